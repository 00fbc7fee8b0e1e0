"""The rules, one file each: why it exists, how it detects and fixes, and examples that prove it."""
