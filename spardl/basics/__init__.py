"""What every other room may use: errors, checks of arguments, files written whole, the version."""
