"""A torch tensor in a jax function, or a jax array in a torch function."""

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded


class ForeignTensor(Cause):
    """A torch tensor is given to jax, or a jax array to torch.

    The two libraries do not know each other's arrays. torchax's tensors count as torch's.
    """

    RECORDED = (
        Recorded(
            "builtins.TypeError",
            "Error interpreting argument to <function step at 0x7f> as an abstract array. The"
            " problematic value is of type <class 'torch.Tensor'> and was passed to the function at"
            " path a.\nThis typically means that a jit-wrapped function was called with a non-array"
            " argument",
            "`jax.jit(step)(torch.ones(3))`",
            "a torch tensor is given to a function of jax",
        ),
        Recorded(
            "builtins.TypeError",
            "function pure at plain.py:62 traced for jit returned a value of type <class"
            " 'torch.return_types.linalg_qr'> at output component [0], which is not a valid JAX"
            " type",
            "`return torch.linalg.qr(x)` under plain torchax and `jax.jit`",
            "the program returns the named tuple of torch.linalg_qr, which jax cannot flatten",
        ),
        Recorded(
            "builtins.TypeError",
            "sum(): argument 'input' (position 1) must be Tensor, not jaxlib._jax.ArrayImpl",
            "`torch.sum(jnp.ones(3))`",
            "a jax array is given to a function of torch",
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain the error, saying which library got the other's array, and in which argument."""
        if raised.says("not a valid JAX type") and raised.says("torch.return_types."):
            made = raised.message.partition("torch.return_types.")[2].partition("'")[0]
            return Explanation(
                f"the program returns the named tuple of torch.{made}, which jax cannot flatten",
                ("return a plain tuple: tuple(result); tpuport.convert does so by itself",),
            )
        if raised.says("of type <class 'torch.", "of type <class 'torchax.") and raised.says(
            "as an abstract array", "not a valid JAX type"
        ):
            path = raised.message.partition("at path ")[2].partition("\n")[0].rstrip(".")
            return Explanation(
                "a torch tensor is given to a function of jax",
                (
                    "call the ported model, or ported.apply inside jax.jit: they take tensors and"
                    " arrays alike",
                    "or pass an array: jax.numpy.asarray(x.numpy())",
                ),
                f"the argument {path}" if path else None,
            )
        if raised.says("must be Tensor, not jaxlib.", "must be Tensor, not DynamicJaxprTracer"):
            return Explanation(
                "a jax array is given to a function of torch",
                (
                    "turn it into a tensor: tpuport.to_torch(x) outside of a program,"
                    " torchax.interop.torch_view(x) inside one",
                ),
                f"the {raised.message.partition('argument ')[2].partition(' must')[0]} argument",
            )
        return None
