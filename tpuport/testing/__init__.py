"""Equivalence checks for authors of rules: rewritten code against the original."""
