"""What to do with which module: plain data, no torch."""
