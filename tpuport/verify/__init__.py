"""`tpuport verify`: a training script in eager PyTorch and ported, compared from outside."""
