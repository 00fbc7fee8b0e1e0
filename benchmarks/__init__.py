"""Benchmarks: speed of running, tracing and lowering a port, next to other ways; `make bench`."""
