"""XLA's programs read as data: computations, collectives, liveness."""
