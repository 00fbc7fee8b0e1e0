"""MAE-DiT: an image autoencoder, a diffusion transformer in its latents, FID while it trains."""
