"""Source to findings to source, shared by `lint`, `rewrite` and `convert`. Needs no framework."""
