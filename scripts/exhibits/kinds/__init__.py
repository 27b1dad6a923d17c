"""Kinds of exhibits: what is trained, counted, predicted, watched or timed, and the tables made of it."""
