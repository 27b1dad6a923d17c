"""Building blocks that several communicators share."""
