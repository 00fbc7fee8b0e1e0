"""Packages that only CUDA hosts can install, for which an import finds a stand-in elsewhere."""

# Packages that build for CUDA only, so that no TPU host can install them. Their decorators compile
# kernels: a function so decorated is no longer the Python function.
CUDA_ONLY = frozenset(
    {
        "amp_C",
        "apex",
        "bitsandbytes",
        "causal_conv1d",
        "causal_conv1d_cuda",
        "cupy",
        "cupyx",
        "deepspeed",
        "flash_attn",
        "flash_attn_interface",
        "flashinfer",
        "flex_block_attn",
        "fused_layer_norm_cuda",
        "megablocks",
        "megatron",
        "nvidia.dali",
        "pycuda",
        "pynvml",
        "sageattention",
        "selective_scan_cuda",
        "tensorrt",
        "torch_tensorrt",
        "transformer_engine",
        "triton",
        "xformers",
        "xfuser",
    }
)


def is_cuda_only(name: str) -> bool:
    """Return whether a module belongs to a package that only CUDA hosts can install."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in CUDA_ONLY for n in range(1, len(parts) + 1))
