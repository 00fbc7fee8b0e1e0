"""Pure function to a program compiled for a described TPU, and what it costs (jax, libtpu)."""
