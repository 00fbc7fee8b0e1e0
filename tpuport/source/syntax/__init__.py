"""Source files as trees, names and text."""
