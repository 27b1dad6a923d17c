"""Figures: one colour for each method, at most five lines in a panel, and axes that suit what they show."""
