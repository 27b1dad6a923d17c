"""Figures: one colour for each method, labels that do not overlap, and axes that suit what they show."""
