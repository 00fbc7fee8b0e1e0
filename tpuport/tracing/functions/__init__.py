"""Torch functions that are handled before they reach ATen ops."""
