"""One file a cause: which exceptions it stands for, why they come, and what to do about them.

Adding a cause means adding a file; the folder is walked. Files with a leading underscore hold none.
"""
