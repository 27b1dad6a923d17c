"""Model builders; each takes what the data decide (classes, channels, vocabulary) as keyword arguments."""
