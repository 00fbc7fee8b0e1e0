"""Text to findings to text: what `lint`, `rewrite` and `convert` share. Needs no framework."""
