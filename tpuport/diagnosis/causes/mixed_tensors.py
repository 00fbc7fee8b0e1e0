"""A plain CPU tensor meets a traced one."""

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded
from tpuport.diagnosis.causes._reading import port_it

_LINKED = ("not linked with support for jax devices", "PrivateUse1HooksInterface")
_PROBLEM = "a plain CPU tensor meets a traced one, and torchax cannot compute with both"


class MixedTensors(Cause):
    """A plain CPU tensor meets one of torchax's.

    torchax's tensors are a class of their own, and its functions take no other. A tensor made
    before the torchax environment was entered (a global, an attribute that is neither parameter
    nor buffer) is still a plain one. Which exception that gives depends on the function: an
    `AssertionError` about "mixed math", or a missing attribute `_elem` or `_env`.
    """

    RULES = ("TPU417",)
    RECORDED = (
        Recorded(
            "builtins.AssertionError",
            "Expect a Tensor or a View but got <class 'torch.Tensor'>; usually this means there is"
            " a mixed math between XLATensor and torch.Tensor",
            "`x + TABLE` under plain torchax, with `TABLE = torch.ones(3)` of the module",
            _PROBLEM,
        ),
        Recorded(
            "builtins.AttributeError",
            "'View' object has no attribute '_elem'",
            "`TABLE[0] = x[0]` under plain torchax",
            _PROBLEM,
        ),
        Recorded(
            "builtins.AttributeError",
            "'Tensor' object has no attribute '_env'",
            "`TABLE.add_(x)` under plain torchax",
            _PROBLEM,
        ),
        Recorded(
            "builtins.RuntimeError",
            "PyTorch is not linked with support for jax devices",
            '`torch.ones(3).to("jax")` outside of torchax\'s environment',
            'torch was asked for the device "jax", which only torchax\'s environment knows',
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain a plain tensor among torchax's, or the device "jax" outside its environment."""
        if raised.says(*_LINKED):
            return Explanation(
                'torch was asked for the device "jax", which only torchax\'s environment knows',
                (
                    "leave tensors on the CPU and port with tpuport.convert(model), which moves"
                    " what has to move",
                    "or wrap the code in `with torchax.default_env():`; torch.compile and flex"
                    " attention do not run once torchax is imported by itself, so set"
                    " TORCHDYNAMO_DISABLE=1",
                ),
            )
        mixed = raised.says("mixed math between XLATensor") or (
            raised.is_a("builtins.AttributeError")
            and raised.says("no attribute '_elem'", "no attribute '_env'")
        )
        if not mixed:
            return None
        return Explanation(
            _PROBLEM,
            (
                port_it(
                    raised,
                    "port with tpuport.convert(model): it makes tensors that do not depend on the"
                    " inputs constants of the program",
                ),
                "or register the tensor as a buffer, or make it in forward with device=x.device",
            ),
        )
