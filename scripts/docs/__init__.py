"""What writes the generated pages of docs/, and the words that they take from nowhere else."""
