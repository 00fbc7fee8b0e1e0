"""The import hook, and packages that are absent or optional."""
