"""The decisions of the eager run of a script that rounding can turn, recorded and turned."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tpuport.model.parity.decisions import CallDecisions, SavedCopy, decisions
from tpuport.model.parity.float64 import Float64
from tpuport.tracing.session.tracer import no_fused_kernels

FILE = "kinks.json"
# Of each call the nearest decisions.
_NEAREST = 24
_MOST_CALLS = 20_000


class Kinks(TorchDispatchMode):
    """Records the decisions of a run, and turns some of them.

    Args:
        turned: The positions to turn, by the number of the call.
        wide: The mode that has the values in float64, if the run is in float64.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, turned: dict[int, list[int]], wide: Float64 | None = None) -> None:
        super().__init__()
        self.turned, self.wide = turned, wide
        self.calls: list[dict[str, Any]] = []
        self._saved = SavedCopy()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if len(self.calls) < _MOST_CALLS:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                made = decisions(func, args, kwargs, self._value)
                if made is not None:
                    self._note(func, args[0], made)
        result = func(*args, **kwargs)
        self._saved.note(func, args, result)
        return result

    def _value(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.wide is None else self.wide.value(x)

    def _note(self, func: Any, x: torch.Tensor, made: CallDecisions) -> None:
        number, sizes = len(self.calls), made.sizes
        nearest = sizes.topk(min(_NEAREST, len(sizes)), largest=False).indices
        nearest = nearest[sizes[nearest].isfinite()]
        sides = made.sides[nearest] if made.sides is not None else made.margins[nearest] > 0
        self.calls.append(
            {
                "op": str(func),
                "shape": list(x.shape),
                "samples": made.samples.tolist(),
                "near": [
                    [int(i), float(made.margins[i]), int(side)]
                    for i, side in zip(nearest, sides, strict=True)
                ],
            }
        )
        turned = self.turned.get(number)
        if turned:
            made.turn(torch.tensor(turned))
            self._saved.update(x)


@contextlib.contextmanager
def watched(settings: dict[str, Any]) -> Iterator[None]:
    """Run a script's part in the block, in float64 if the settings say so, and write what it was.

    Args:
        settings: Those of the run: its `folder`; `float64`; `turned`, positions by call.
    """
    turned = {int(call): positions for call, positions in settings["turned"].items()}
    wide = Float64() if settings["float64"] else None
    kinks = Kinks(turned, wide)
    with contextlib.ExitStack() as stack:
        if wide is not None:
            stack.enter_context(no_fused_kernels())
            stack.enter_context(wide)
        stack.enter_context(kinks)
        try:
            yield
        finally:  # the script is stopped by an exception
            narrow = {} if wide is None else wide.narrow
            Path(settings["folder"], FILE).write_text(
                json.dumps({"calls": kinks.calls, "narrow": narrow})
            )
