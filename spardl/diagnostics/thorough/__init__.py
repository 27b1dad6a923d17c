"""``spardl doctor --thorough``: all checks of one device, each in a separate process."""
