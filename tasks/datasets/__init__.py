"""Data sets held in memory, read or made by one function each."""
