"""The commands of `tpuport`, one module each. With `cli` they are the only modules that print."""
