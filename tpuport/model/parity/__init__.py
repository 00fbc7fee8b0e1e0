"""Comparison of a port with eager PyTorch."""
