"""What the papers claim, and the rules that judge it."""
