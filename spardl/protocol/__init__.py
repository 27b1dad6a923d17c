"""What parts agree on: programs of messages, the step they belong to, what they cost, and what they carry over."""
