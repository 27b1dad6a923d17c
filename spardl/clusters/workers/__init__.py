"""Worker processes: which of how many this one is, where they meet, how they are started, watched and ended."""
