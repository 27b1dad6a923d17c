"""Shared helpers: errors, argument checks, atomic file writes, weak references and the version."""
