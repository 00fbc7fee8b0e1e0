"""Scoped replacements of calls inside other people's packages.

One file a shim; shims are found by walking the folder.
"""
