"""Replacements of torch's functions while a program is traced.

One file a patch, the folder is walked.
"""
