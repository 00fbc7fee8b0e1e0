"""Compiled programs kept between processes: jax's compile cache, its folder, warm-up."""
