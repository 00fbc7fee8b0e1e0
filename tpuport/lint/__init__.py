"""The linter: it finds files, checks them, filters the findings and writes the report."""
