"""Causes of exceptions, one per file: how to recognize them, why they occur, and what to do.

Adding a cause means adding a file; the folder is walked. Files with a leading underscore hold none.
"""
