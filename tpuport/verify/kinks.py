"""Decisions that rounding can turn: which side of a kink a number is on, which of a window is
largest.

A mode for the eager run of a script. It records how near each decision is, and turns those that it
is told to, by the smallest change of one number. Ops that it does not know have no decisions.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tpuport.model.parity.float64 import Float64
from tpuport.tracing.session.tracer import no_fused_kernels

FILE = "kinks.json"
# Of each call: elements that show how far rounding moves them, and the nearest decisions.
_SAMPLES, _NEAREST = 256, 24
_MOST_CALLS = 20_000

_aten = torch.ops.aten


@dataclass(frozen=True)
class CallDecisions:
    """The decisions of one call.

    Attributes:
        margins: How far each number is from the kink, by its sign on which side; of a window, how
            far the second largest is from the largest.
        sides: By decision the element that wins; None where the sign is the side.
        turn: Makes the decisions at some positions fall the other way.
    """

    margins: torch.Tensor
    sides: torch.Tensor | None
    turn: Callable[[Sequence[int]], None]


DecisionRule = Callable[
    [torch.Tensor, torch.Tensor, Sequence[Any], dict[str, Any]], CallDecisions | None
]


def _points(*points: float) -> DecisionRule:
    """Return the rule of a function with kinks at some points."""
    return lambda x, value, args, kwargs: _at(x, value, [torch.tensor(p) for p in points])


def _given(*names: tuple[int, str, float | None]) -> DecisionRule:
    """Return the rule of a function whose arguments are its kinks, with their defaults."""

    def rule(x: torch.Tensor, value: torch.Tensor, args: Any, kwargs: Any) -> CallDecisions | None:
        found = [args[i] if len(args) > i else kwargs.get(n, d) for i, n, d in names]
        return _at(x, value, [torch.as_tensor(point) for point in found if point is not None])

    return rule


def _around_zero(
    x: torch.Tensor, value: torch.Tensor, args: Any, kwargs: Any
) -> CallDecisions | None:
    size = torch.as_tensor(args[1] if len(args) > 1 else kwargs.get("lambd", 0.5))
    return _at(x, value, [size, -size])


def _whole(shift: float) -> DecisionRule:
    """Return the rule of a function that steps at whole numbers, or at halves."""
    return lambda x, value, args, kwargs: _at(x, value, [(value - shift).round() + shift])


def _at(
    x: torch.Tensor, value: torch.Tensor, points: Sequence[torch.Tensor]
) -> CallDecisions | None:
    if not points or any(torch.broadcast_shapes(p.shape, x.shape) != x.shape for p in points):
        return None
    each = torch.stack([point.double().expand(x.shape) for point in points])
    nearest = each.gather(0, (value - each).abs().argmin(0, keepdim=True))[0].reshape(-1)
    margins = value.reshape(-1) - nearest

    def turn(positions: Sequence[int]) -> None:
        for position in positions:
            place = _place(x, position)
            point, up = nearest[position].to(x.dtype), bool(margins[position] <= 0)
            other = (nearest[position] - margins[position]).to(x.dtype)
            if bool(other <= point) if up else bool(other >= point):
                other = _next(point, up=up)
            x[place] = other

    return CallDecisions(margins, None, turn)


def _of_two(x: torch.Tensor, value: torch.Tensor, args: Any, kwargs: Any) -> CallDecisions | None:
    """Return the decisions of which of two numbers is larger."""
    other = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
    return None if other is None else _at(x, value, [torch.as_tensor(other)])


def _along(largest: bool) -> DecisionRule:
    """Return the rule of an extreme along dims."""

    def rule(x: torch.Tensor, value: torch.Tensor, args: Any, kwargs: Any) -> CallDecisions | None:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        dims = range(x.dim()) if dim is None or dim == [] else [dim] if type(dim) is int else dim
        last = sorted(d % x.dim() for d in dims)
        order = [d for d in range(x.dim()) if d not in last] + last
        where = torch.arange(x.numel()).reshape(x.shape).permute(order)
        size = max(1, int(torch.tensor([x.shape[d] for d in last]).prod()))
        rows = (a.reshape(-1, size) for a in (value.permute(order), where))
        return _windows(x, *rows, largest=largest)

    return rule


def _pool(x: torch.Tensor, value: torch.Tensor, args: Any, kwargs: Any) -> CallDecisions | None:
    """Return the decisions of a maximum over windows of an image."""
    del kwargs
    size, stride, padding, dilation = (
        _pair(args[i]) if len(args) > i and args[i] != [] else None for i in (1, 2, 3, 4)
    )
    assert size is not None
    padding = padding or (0, 0)
    images = value.reshape(-1, 1, *x.shape[-2:])
    where = torch.arange(x.numel(), dtype=torch.float64).reshape(images.shape)
    edges = (padding[1], padding[1], padding[0], padding[0])

    def rows(images: torch.Tensor, edge: float) -> torch.Tensor:
        wider = torch.nn.functional.pad(images, edges, value=edge)
        parts = torch.nn.functional.unfold(
            wider, size, dilation=dilation or (1, 1), stride=stride or size
        )
        return parts.transpose(1, 2).reshape(-1, size[0] * size[1])

    return _windows(x, rows(images, -torch.inf), rows(where, 0.0).long(), largest=True)


def _pair(value: Any) -> tuple[int, int]:
    values = [value] if isinstance(value, int) else list(value)
    return values[0], values[-1]


def _windows(
    x: torch.Tensor, rows: torch.Tensor, where: torch.Tensor, *, largest: bool
) -> CallDecisions | None:
    if rows.shape[-1] < 2:
        return None
    best = rows.topk(2, dim=-1, largest=largest)
    places = where.gather(-1, best.indices)
    margins = (best.values[:, 0] - best.values[:, 1]).abs()

    def turn(positions: Sequence[int]) -> None:
        for position in positions:
            first, second = (_place(x, int(i)) for i in places[position])
            x[second] = _next(x[first], up=largest)

    return CallDecisions(margins, places[:, 0], turn)


def _place(x: torch.Tensor, position: int) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(position), x.shape))


def _next(value: torch.Tensor, *, up: bool) -> torch.Tensor:
    return torch.nextafter(value, torch.tensor(torch.inf if up else -torch.inf, dtype=value.dtype))


_RULES: dict[Any, DecisionRule] = {}


def _add(rule: DecisionRule, *ops: str) -> None:
    for op in ops:
        name, _, overload = op.partition(".")
        for each in (name, f"{name}_"):
            packet = getattr(_aten, each, None)
            if packet is not None and (overload or "default") in packet.overloads():
                _RULES[getattr(packet, overload or "default")] = rule


_add(_points(0.0), "relu", "leaky_relu", "abs", "sign", "sgn", "elu", "_prelu_kernel")
_add(_points(0.0), "rrelu_with_noise")
_add(_points(-3.0, 3.0), "hardswish", "hardsigmoid")
_add(_points(0.0, 6.0), "relu6")
_add(_given((1, "min_val", -1.0), (2, "max_val", 1.0)), "hardtanh")
_add(_given((1, "min", None), (2, "max", None)), "clamp", "clamp.Tensor")
_add(_given((1, "min", None)), "clamp_min", "clamp_min.Tensor")
_add(_given((1, "max", None)), "clamp_max", "clamp_max.Tensor")
_add(_given((1, "threshold", None)), "threshold")
_add(_around_zero, "hardshrink", "softshrink")
_add(_whole(0.0), "floor", "ceil", "trunc", "frac")
_add(_whole(0.5), "round")
for _op in ("gt", "ge", "lt", "le"):
    _add(_of_two, f"{_op}.Scalar", f"{_op}.Tensor")
_add(_of_two, "maximum", "minimum")
_add(_along(True), "amax", "max", "max.dim", "argmax")
_add(_along(False), "amin", "min", "min.dim", "argmin")
_add(_pool, "max_pool2d_with_indices")


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

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None and len(self.calls) < _MOST_CALLS:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                self._look(func, rule, args, kwargs)
        return func(*args, **kwargs)

    def _look(
        self, func: Any, rule: DecisionRule, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        x = args[0]
        if not (type(x) in (torch.Tensor, torch.nn.Parameter) and x.is_floating_point()):
            return
        if not x.numel() or not x.dim():
            return
        value = x.double() if self.wide is None else self.wide.value(x).double()
        made = rule(x, value, args, kwargs)
        if made is None:
            return
        number = len(self.calls)
        margins = made.margins
        sizes = margins.abs()
        # An exact tie is none of rounding; there may be many, such as zeros in a window.
        sizes = torch.where((sizes > 0) & sizes.isfinite(), sizes, torch.inf)
        nearest = sizes.topk(min(_NEAREST, len(sizes)), largest=False).indices
        nearest = nearest[sizes[nearest].isfinite()]
        sides = made.sides[nearest] if made.sides is not None else margins[nearest] > 0
        step = max(1, len(margins) // _SAMPLES)
        self.calls.append(
            {
                "op": str(func),
                "shape": list(x.shape),
                "samples": margins[::step][:_SAMPLES].nan_to_num(0.0, 0.0, 0.0).tolist(),
                "near": [
                    [int(i), float(margins[i]), int(side)]
                    for i, side in zip(nearest, sides, strict=True)
                ],
            }
        )
        made.turn(self.turned.get(number, ()))


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
