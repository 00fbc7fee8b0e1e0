"""Scoped replacements of calls inside other people's packages; one file a shim, the folder is walked."""
