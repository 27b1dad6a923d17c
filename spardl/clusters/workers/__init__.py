"""Worker processes: how they are started, watched and stopped, and how they find one another."""
