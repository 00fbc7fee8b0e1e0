"""HunyuanVideo-1.5 on TPU, with the unchanged classes of diffusers or of upstream."""
