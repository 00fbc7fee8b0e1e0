"""Patterns in a traced program that are computed in another way: attention written out, windows."""

from tpuport.tracing.patterns.rewriting import patterns_for, rewritten

__all__ = ["patterns_for", "rewritten"]
