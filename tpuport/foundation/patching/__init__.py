"""Scoped replacement of attributes in other packages."""
