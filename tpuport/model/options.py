"""What `tpuport.convert` was asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.tracing.session.graph_passes import Pass

BLOCKS = ("auto", "scan", "once", "unroll")
VERIFY = (True, False, "first", "sample", "always")


@dataclass(frozen=True)
class ConvertOptions:
    """The options of a ported model, as `tpuport.convert` explains them.

    `methods` are names, and `functions` are those of them that the user gave as functions.
    """

    methods: tuple[str, ...] = ("forward",)
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    verify: bool | str = True
    rtol: float | None = None
    checks: bool = True
    matmul_precision: str | None = "highest"
    blocks: str = "auto"
    fallback: str | None = None
    passes: tuple[Pass, ...] = ()

    def __post_init__(self) -> None:
        """Refuse an unknown way to trace blocks or to verify."""
        if self.verify not in VERIFY:
            choices = ", ".join(map(repr, VERIFY))
            raise UsageError(f"verify is one of {choices}; got {self.verify!r}")
        if self.blocks not in BLOCKS:
            choices = ", ".join(map(repr, BLOCKS))
            raise UsageError(f"blocks is one of {choices}; got {self.blocks!r}")
        if self.passes and "forward" not in self.methods:
            raise UsageError("passes change the graph of forward, which methods does not name")
        if self.fallback not in (None, "host"):
            raise UsageError(f"fallback is None or 'host'; got {self.fallback!r}")
