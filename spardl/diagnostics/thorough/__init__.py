"""``spardl doctor --thorough``: all that a device is to do, checked on it, each check in a process of its own."""
