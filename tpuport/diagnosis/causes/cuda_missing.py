"""The code asks for CUDA, and this machine has none."""

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded

_PROBLEM = "the code asks for CUDA, which this machine does not have"
_TEXTS = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "Attempting to deserialize object on a CUDA device",
    "libcuda.so",
    "libcudart.so",
    "libcublas.so",
    "libnccl",
    "doesn't have NCCL built in",
    "no attribute '_cuda_",
    "CUDA_HOME environment variable is not set",
    "No CUDA GPUs are available",
)


class CudaMissing(Cause):
    """The code asks for CUDA.

    `.cuda()`, `device="cuda"`, `torch.load` of a checkpoint saved on a GPU, the NCCL backend and
    extensions with kernels need an NVIDIA driver. A TPU machine has none, and the CPU build of
    torch does not even have the code.
    """

    RULES = ("TPU510", "TPU511", "TPU512", "TPU514", "TPU515")
    RECORDED = (
        Recorded(
            "builtins.AssertionError",
            "Torch not compiled with CUDA enabled",
            "`torch.ones(2).cuda()`",
            _PROBLEM,
        ),
        Recorded(
            "builtins.RuntimeError",
            "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is"
            " False.",
            '`torch.load(file, map_location="cuda")`',
            _PROBLEM,
        ),
        Recorded(
            "builtins.RuntimeError",
            "Distributed package doesn't have NCCL built in",
            '`torch.distributed.init_process_group("nccl")`',
            _PROBLEM,
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain errors of torch, the driver and the dynamic loader, recognized by their text."""
        if not raised.says(*_TEXTS):
            return None
        return Explanation(
            _PROBLEM,
            (
                "run the script with `tpuport run script.py`, or the code inside"
                " `with tpuport.porting():`, where calls of CUDA and NCCL are answered",
            ),
        )
