"""What every room may use: errors, interop, pytrees, patching, reporting."""
