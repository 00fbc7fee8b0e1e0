"""Comparison of a port that others wrote with its PyTorch original."""
