"""The decisions of the eager run of a script that rounding can turn, recorded and turned."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tpuport.model.parity.decisions import CallDecisions, SavedCopy, decisions, memory_of
from tpuport.model.parity.float64 import Float64
from tpuport.tracing.session.activate import no_fused_kernels
from tpuport.verify.port_decisions import PortDecisions, save_ties

FILE = "kinks.json"
# Of each call the nearest decisions.
_NEAREST = 24
_MOST_CALLS = 20_000


class Kinks(TorchDispatchMode):
    """Records the decisions of a run, and turns some of them.

    Args:
        turned: The positions to turn, by the number of the call.
        wide: The mode that has the values in float64, if the run is in float64.
        port: The decisions of the port, which the run is to take.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(
        self,
        turned: dict[int, list[int]],
        wide: Float64 | None = None,
        port: PortDecisions | None = None,
    ) -> None:
        super().__init__()
        self.turned, self.wide, self.port = turned, wide, port
        self.calls: list[dict[str, Any]] = []
        self.ties: dict[int, torch.Tensor] = {}
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
        if self.port is not None and self.port.is_inside:
            given = {0, *(memory_of(leaf) for leaf in tree_leaves((args, kwargs)))}
            self.port.own |= {memory_of(leaf) for leaf in tree_leaves(result)} - given
        return result

    def _value(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.wide is None else self.wide.value(x)

    def _note(self, func: Any, x: torch.Tensor, made: CallDecisions) -> None:
        number, sizes = len(self.calls), made.sizes
        nearest = sizes.topk(min(_NEAREST, len(sizes)), largest=False).indices
        nearest = nearest[sizes[nearest].isfinite()]
        positions = self.turned.get(number, [])
        call = {
            "op": str(func),
            "shape": list(x.shape),
            "samples": made.samples.tolist(),
            "near": _shown(made, nearest),
        }
        if self.port is not None:
            taken = self.port.taken(number, func, x, made)
            if taken is not None and memory_of(x) in self.port.own:
                call |= {"reach": taken.reach, "told": taken.told.tolist()}
                call |= {"taken": _shown(made, taken.turned)}
                positions = [*taken.turned.tolist(), *positions]
        if self.wide is not None and made.ties is not None:
            self.ties[number] = made.ties
        self.calls.append(call)
        if positions:
            made.turn(torch.tensor(positions))
            self._saved.update(x)


def _shown(made: CallDecisions, where: torch.Tensor) -> list[list[Any]]:
    """Return decisions at some positions, each with its margin and side."""
    sides = made.sides[where] if made.sides is not None else made.margins[where] > 0
    return [
        [int(i), float(made.margins[i]), int(side)] for i, side in zip(where, sides, strict=True)
    ]


@contextlib.contextmanager
def watched(settings: dict[str, Any]) -> Iterator[None]:
    """Run a script's part in the block, in float64 if the settings say so, and write what it was.

    Args:
        settings: Those of the run: its `folder`; `float64`; `turned`, positions by call; `taken`,
            where the port's programs tell their decisions: the folders of what they kept, of a run
            in float64 (None to take nothing), and of one that tells how far rounding reaches (None
            if it is to be found).
    """
    turned = {int(call): positions for call, positions in settings["turned"].items()}
    wide, port = Float64() if settings["float64"] else None, _port(settings["taken"])
    kinks = Kinks(turned, wide, port)
    with contextlib.ExitStack() as stack:
        if port is not None:
            stack.enter_context(port.followed())
        if wide is not None:
            stack.enter_context(no_fused_kernels())
            stack.enter_context(wide)
        stack.enter_context(kinks)
        try:
            yield
        finally:  # the script is stopped by an exception
            narrow = {} if wide is None else wide.narrow
            folder = Path(settings["folder"])
            (folder / FILE).write_text(json.dumps({"calls": kinks.calls, "narrow": narrow}))
            save_ties(folder, kinks.ties)


def calls_in(folder: Path) -> list[dict[str, Any]]:
    """Return the decisions of a run by its calls of ops that decide."""
    return json.loads((folder / FILE).read_text())["calls"]


def _port(folders: dict[str, str | None] | None) -> PortDecisions | None:
    if folders is None:
        return None
    paths = {name: Path(path) for name, path in folders.items() if path is not None}
    exact, near = paths.get("exact"), paths.get("near")
    reaches = None if near is None else [call.get("reach") for call in calls_in(near)]
    calls = [] if exact is None else calls_in(exact)
    return PortDecisions(paths["kept"], exact, calls, reaches)
