"""Trainings whose figures are kept in the repository, and the tables that are made of them."""
