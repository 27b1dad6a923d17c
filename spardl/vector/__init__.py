"""Gradients as vectors: which entries are chosen, how sparse ones are added up, and the bytes they become."""
