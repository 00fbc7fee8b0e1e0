"""An array that was donated or deleted is used again."""

import re

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded

_PROBLEM = "an array is used after its memory was donated or freed"
_SHAPE = re.compile(r"shape=(\w+\[[\d,]*\])")


class DeletedArray(Cause):
    """An array was donated to an earlier call, and is used again.

    With `donate_argnums` a program writes its results into the memory of its arguments. The arrays
    passed are dead afterwards; the results take their place. Reading `ported.params` after a step
    that donated them is the usual case.
    """

    RECORDED = (
        Recorded(
            "builtins.RuntimeError",
            "Array has been deleted with shape=float32[4].",
            "`step = jax.jit(f, donate_argnums=0); step(a); a + 1`",
            _PROBLEM,
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain the error, naming the shape of the array."""
        if not raised.says("Array has been deleted", "buffer has been deleted or donated"):
            return None
        shape = _SHAPE.search(raised.message)
        return Explanation(
            _PROBLEM,
            (
                "continue with the results of the call that took it (params = step(params, batch)),"
                " and put them back into the port: ported.params = params",
                "or leave the argument out of donate_argnums",
            ),
            shape.group(1) if shape else None,
        )
