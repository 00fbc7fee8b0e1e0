"""Diagnosis of exceptions from torch, torchax and jax: meaning, origin, remedies."""
