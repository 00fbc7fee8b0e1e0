"""Ready-made ports, one folder a model; each works on the untouched upstream code."""
