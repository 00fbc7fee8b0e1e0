"""Matching of rules and edits of source text."""
