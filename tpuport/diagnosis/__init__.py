"""What an exception from torch, torchax or jax means, where it comes from, and what to do."""
