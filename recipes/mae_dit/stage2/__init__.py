"""Class-conditional diffusion in latents: its losses, samplers and class dropout."""
