"""Attention calls: their masks understood, a kernel chosen."""
