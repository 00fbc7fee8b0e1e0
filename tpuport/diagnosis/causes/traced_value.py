"""Python asks for the value of a traced tensor."""

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded
from tpuport.diagnosis.causes._reading import CONVERT, port_it, traced_value

_CLASSES = (
    "jax.ConcretizationTypeError",
    "jax.TracerBoolConversionError",
    "jax.TracerIntegerConversionError",
)


class TracedValue(Cause):
    """Python needs the value of a tensor that has none yet.

    Under `jax.jit` the code runs once with abstract values, which know their shape and dtype only.
    `if`, `while`, `bool()`, `int()`, `float()`, `.item()`, `.tolist()` and `range()` need a number
    at that time, so they cannot depend on the inputs of the program. In PyTorch each of them waits
    for the GPU and copies the number to the host.
    """

    RULES = (
        *("TPU101", "TPU110", "TPU103", "TPU102", "TPU104", "TPU111", "TPU119", "TPU114"),
        *("TPU121", "TPU112", "TPU212", "TPU310", "TPU311"),
    )
    RECORDED = (
        Recorded(
            "jax.errors.ConcretizationTypeError",
            "Abstract tracer value encountered where concrete value is expected: traced array with"
            " shape bool[]\nThis occurred in the item() method of jax.Array\nThe error occurred"
            " while tracing the function pure at plain.py:62 for jit. This concrete value was not"
            " available in Python because it depends on the value of the argument args[0].\n",
            "`if x.sum() > 0:` under plain torchax and `jax.jit`",
            "Python needs the value of a traced tensor, which has none while the program is traced",
        ),
        Recorded(
            "jax.errors.TracerIntegerConversionError",
            "The __index__() method was called on traced array with shape int32[]\nThe error"
            " occurred while tracing the function step at step.py:1 for jit. This concrete value"
            " was not available in Python because it depends on the value of the argument a.\n",
            "a list indexed with a traced number",
            "Python needs the value of a traced tensor, which has none while the program is traced",
        ),
        Recorded(
            "builtins.RuntimeError",
            "Tensor.item() cannot be called on meta tensors",
            "`torch.tensor([x[0], 1.0])` under plain torchax",
            "torchax cannot make a number or a tensor out of a traced value here",
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain the error, naming the value needed and the argument that it depends on."""
        if raised.is_a(*_CLASSES) and not raised.says("must be statically specified"):
            return Explanation(
                "Python needs the value of a traced tensor, which has none while the program is"
                " traced",
                (port_it(raised, CONVERT),),
                traced_value(raised.message),
            )
        if raised.says("Shapes must be 1D sequences of concrete values"):
            return Explanation(
                "a shape is given by a traced number, and shapes are fixed when the program is"
                " traced",
                (
                    "pass the number as a Python int: static_argnums of jax.jit, or an int argument"
                    " of the ported model",
                ),
                traced_value(raised.message),
            )
        if raised.says("cannot be called on meta tensors"):
            return Explanation(
                "torchax cannot make a number or a tensor out of a traced value here",
                (port_it(raised, CONVERT),),
            )
        return None
