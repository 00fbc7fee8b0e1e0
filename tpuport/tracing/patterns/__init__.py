"""Patterns in a traced program that are computed in another way: attention written out."""

from tpuport.tracing.patterns.rewriting import rewritten

__all__ = ["rewritten"]
