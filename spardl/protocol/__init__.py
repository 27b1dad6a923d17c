"""Vocabulary that the parts of a method share: programs of messages, contexts, costs and state."""
