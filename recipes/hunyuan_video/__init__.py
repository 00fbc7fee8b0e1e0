"""HunyuanVideo-1.5 on TPU, with diffusers' or upstream's own classes as they are."""
