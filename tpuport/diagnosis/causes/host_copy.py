"""NumPy or DLPack asks for the memory of a traced tensor."""

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded
from tpuport.diagnosis.causes._reading import CONVERT, port_it, traced_value

_TRACER = ("DynamicJaxprTracer", "JitTracer")


class HostCopy(Cause):
    """A traced tensor is handed to NumPy or to another library.

    `.numpy()`, `np.asarray(x)`, `torch.from_numpy(x)` and DLPack read memory. While the program is
    traced there is none: the value is a name for something that the compiled program computes
    later.
    """

    RULES = ("TPU310", "TPU311", "TPU415")
    RECORDED = (
        Recorded(
            "jax.errors.TracerArrayConversionError",
            "The numpy.ndarray conversion method __array__() was called on traced array with shape"
            " float32[4,3]\nThe error occurred while tracing the function pure at plain.py:62 for"
            " jit. This concrete value was not available in Python because it depends on the value"
            " of the argument args[0].\nSee https://docs.jax.dev/",
            "`x.numpy()` under plain torchax and `jax.jit`",
            "a traced tensor is copied to NumPy, and it has no memory while the program is traced",
        ),
        Recorded(
            "builtins.TypeError",
            "expected np.ndarray (got DynamicJaxprTracer)",
            "`torch.from_numpy(a)` with a traced array",
            "a traced array is handed to torch, which needs its memory",
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain the error, naming the value, and the direction of the copy."""
        if raised.is_a("jax.TracerArrayConversionError"):
            return Explanation(
                "a traced tensor is copied to NumPy, and it has no memory while the program is"
                " traced",
                (
                    port_it(raised, CONVERT),
                    "or return the tensor from the program and copy it outside, or compute with"
                    " torch functions in place of NumPy's",
                ),
                traced_value(raised.message),
            )
        if raised.says(*_TRACER) and raised.says("expected np.ndarray", "__dlpack"):
            return Explanation(
                "a traced array is handed to torch, which needs its memory",
                (
                    "view it as a tensor inside the program: torchax.interop.torch_view(x), or"
                    " call the ported model's apply, which takes jax arrays",
                ),
            )
        return None
