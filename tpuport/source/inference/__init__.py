"""Abstract interpretation of source text: which expressions are traced."""
