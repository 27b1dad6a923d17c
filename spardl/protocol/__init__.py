"""Common vocabulary of the parts of a method: programs of messages, contexts, costs and state."""
