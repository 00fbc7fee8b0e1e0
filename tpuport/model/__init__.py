"""Live model to pure function: observe, trace, verify, report (torch, jax, torchax)."""
