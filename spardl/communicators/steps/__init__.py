"""Pieces that several communicators are made of."""
