"""A line of tpuport or torchax fails that was not meant to."""

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded

# What a wrong line of a library raises. Other errors are, as a rule, what torch or jax says of the
# values that the script gave, below a wrapper of tpuport.
_FAULTS = (
    "builtins.AssertionError",
    "builtins.AttributeError",
    "builtins.KeyError",
    "builtins.NameError",
)


class UnforeseenError(Cause):
    """A line of tpuport or torchax fails that was not meant to.

    tpuport refuses code on purpose with a `PortError`, which says what to do. An `AttributeError`,
    `KeyError`, `AssertionError` or `NameError` that one of its own lines causes, or one of torchax,
    is a fault of the library: the script is not wrong, and no edit is asked for. This is the cause
    if no other one is known.
    """

    LAST = True
    RECORDED = (
        Recorded(
            "builtins.AttributeError",
            "'NoneType' object has no attribute 'aval'",
            "a line of tpuport that expected a traced value",
            "tpuport fails here by a fault of its own, not of your code",
            inside="tpuport",
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain an error by the library whose own line caused it."""
        if raised.inside is None or not raised.is_a(*_FAULTS):
            return None
        name = raised.module or "NAME"
        whose = "by a fault of its own" if raised.inside == "tpuport" else "by a fault of torchax"
        return Explanation(
            f"tpuport fails here {whose}, not of your code",
            (
                "please report it, with the script and the traceback that TPUPORT_DEBUG=1 shows",
                "or, until it is mended, leave the module to eager PyTorch on the CPU:"
                f" `tpuport run --eager {name}`",
            ),
            details=(f"the line: {raised.raised_at}",) if raised.raised_at else (),
        )
