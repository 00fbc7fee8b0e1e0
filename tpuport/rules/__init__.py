"""One file a rule: why it exists, how it detects, how it fixes, and the examples that prove it."""
