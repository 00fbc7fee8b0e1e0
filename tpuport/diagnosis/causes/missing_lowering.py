"""torchax does not know an operator."""

import re

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded
from tpuport.diagnosis.causes._reading import port_it

_NAME = re.compile(r"Operator with name (\S+) has no lowering")


class MissingLowering(Cause):
    """torchax has no lowering for an operator.

    A lowering says how an operator of PyTorch is computed with jax. docs/coverage.md lists every
    operator and who lowers it.
    """

    RULES = ("TPU120", "TPU411", "TPU419")
    RECORDED = (
        Recorded(
            "torchax.tensor.OperatorNotFound",
            "Operator with name aten::hann_window has no lowering",
            "`torch.hann_window(3)` under plain torchax",
            "torchax has no lowering for aten::hann_window",
        ),
        Recorded(
            "builtins.ValueError",
            "FlexAttention is only supported on CUDA, CPU, HPU, or MPS devices. Found input"
            " tensors on jax device.",
            "`flex_attention(q, k, v)` under plain torchax",
            "torchax has no lowering for flex_attention",
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain the error, naming the operator."""
        found = _NAME.search(raised.message)
        if found is None and not raised.is_a("torchax.OperatorNotFound"):
            if not raised.says("FlexAttention is only supported on"):
                return None
            name = "flex_attention"
        else:
            name = found.group(1) if found else "an operator"
        return Explanation(
            f"torchax has no lowering for {name}",
            (
                port_it(
                    raised,
                    "port with tpuport.convert(model), which brings lowerings for most of what"
                    " torchax lacks (docs/coverage.md)",
                ),
                "or write the line with other operators; the in-place form of an operator can be"
                " missing where y = torch.op(x) is there",
            ),
        )
