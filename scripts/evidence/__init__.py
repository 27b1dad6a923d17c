"""Trainings whose results are stored in the repository, and the tables made from them."""
