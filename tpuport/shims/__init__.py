"""Scoped replacements of calls inside other people's packages.

One file a shim, the folder is walked.
"""
