"""Ready-made ports, one folder per model. Each works on the untouched upstream code."""
