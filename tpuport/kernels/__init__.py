"""Pallas and plain-jax kernels."""
