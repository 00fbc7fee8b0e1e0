"""Compilation of a pure function for a described TPU, and what it costs (jax, libtpu)."""
