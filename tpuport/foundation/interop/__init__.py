"""Values between torch and jax, dtypes, and where tensors count as being."""
