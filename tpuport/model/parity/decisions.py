"""Decisions that rounding can turn: which side of a kink a number is on, which of a window is
largest.

Ops that are not known here have no decisions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# A decision is open if its margin is at most so many times what rounding moves the numbers by.
REACH = 8.0
# Rounding takes any number over so many of its last bits.
_BITS = 4
# Of each call: elements that show how far rounding moves them.
SAMPLES = 256
# So many elements tell whether an array is of a call: few if it is not.
_LOOKED_AT = (1 << 10, 1 << 14)
# Such a share of numbers may be further apart than rounding reaches in general.
_OUTLIERS = 0.01

_aten = torch.ops.aten

# Tells from an array of another run which decisions fall the other way there, of those that it was
# made for; None if the array does not tell.
OtherRun = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class CallDecisions:
    """The decisions of one call.

    Attributes:
        margins: How far each number is from the kink, by its sign on which side; of a window, how
            far the second largest is from the largest.
        units: The last bits of each number.
        sides: By decision the element that wins; None where the sign is the side.
        turn: Makes the decisions at some positions fall the other way.
        other_run: Returns what compares decisions at some positions with those of another run; the
            number is how far rounding reaches.
    """

    margins: torch.Tensor
    units: torch.Tensor
    sides: torch.Tensor | None
    turn: Callable[[torch.Tensor], None]
    other_run: Callable[[torch.Tensor, float], OtherRun]

    @property
    def sizes(self) -> torch.Tensor:
        """Return how near each decision is.

        An exact tie is none of rounding, and counts as far; there may be many, such as zeros in a
        window.
        """
        sizes = self.margins.abs()
        return torch.where((sizes > 0) & sizes.isfinite(), sizes, torch.inf)

    @property
    def ties(self) -> torch.Tensor | None:
        """Return which numbers are at a kink exactly; None if there are none."""
        ties = self.margins == 0
        return ties if bool(ties.any()) else None

    def open(self, far: float, ties: torch.Tensor | None) -> torch.Tensor:
        """Return the positions of decisions that rounding may turn, if it reaches so far.

        It takes any number over its last bits, but not one that is at the kink exactly in float64,
        too: `ties` are those.
        """
        near = self.margins.abs() <= self.units.clamp(min=far)
        if ties is not None:
            near &= ~(ties & (self.margins == 0))
        return near.nonzero()[:, 0]

    @property
    def samples(self) -> torch.Tensor:
        """Return some of the margins, the same ones of each run."""
        step = max(1, len(self.margins) // SAMPLES)
        return self.margins[::step][:SAMPLES].nan_to_num(0.0, 0.0, 0.0)


class SavedCopy:
    """The copy that autograd makes of what an op in place is about to overwrite.

    Its backward pass reads the copy, so a number that is turned has to be turned there, too.
    """

    def __init__(self) -> None:
        self._copied: tuple[int, torch.Tensor] | None = None

    def note(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Take note of an op that ran."""
        self._copied = (memory_of(args[0]), result) if func is _aten.clone.default else None

    def update(self, x: torch.Tensor) -> None:
        """Copy the operand of the op that runs next again, if the last op was that copy."""
        if self._copied is not None and self._copied[0] == memory_of(x):
            self._copied[1].data.copy_(x)


def memory_of(value: Any) -> int:
    """Return a number that tells apart what plain tensors are stored in; 0 for anything else."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return 0
    return value.untyped_storage()._cdata


def reach(mine: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far rounding may take numbers, by their samples in two kinds of arithmetic."""
    moved = (mine.double() - other.double()).abs()
    moved = moved[moved != 0]
    return REACH * float(moved.median()) if moved.numel() else 0.0


DecisionRule = Callable[
    [torch.Tensor, torch.Tensor, Sequence[Any], dict[str, Any]], CallDecisions | None
]


def decisions(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], value: Callable[[Any], torch.Tensor]
) -> CallDecisions | None:
    """Return the decisions of a call of an op, None if it has none.

    Args:
        func: The op.
        args: Its arguments.
        kwargs: Its keyword arguments.
        value: Returns a tensor's values in float64.
    """
    rule = _RULES.get(func)
    if rule is None or type(args[0]) not in (torch.Tensor, torch.nn.Parameter):
        return None
    x: torch.Tensor = args[0]
    if not (x.is_floating_point() and x.numel() and x.dim()):
        return None
    return rule(x, value(x).double(), args, kwargs)


# -- kinks -----------------------------------------------------------------------------------------


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
    flat = value.reshape(-1)
    each = [point.double().expand(x.shape).reshape(-1) for point in points]
    nearest, margins = each[0], flat - each[0]
    for other in each[1:]:
        margin = flat - other
        nearer = margin.abs() < margins.abs()
        nearest = torch.where(nearer, other, nearest)
        margins = torch.where(nearer, margin, margins)

    units = _units(flat, x.dtype)

    def turn(positions: torch.Tensor) -> None:
        margin, exact = margins[positions], nearest[positions]
        point, up = exact.to(x.dtype), margin <= 0
        other = (exact - margin).to(x.dtype)
        too_near = torch.where(up, other <= point, other >= point)
        _write(x, positions, torch.where(too_near, _next(point, up=up), other))

    def other_run(positions: torch.Tensor, near: float) -> OtherRun:
        return _Regions(flat, each, (margins, units), positions, near).turned_in

    return CallDecisions(margins, units, None, turn, other_run)


class _Regions:
    """The regions between kinks that numbers are in, of which an array of another run may tell.

    Args:
        value: The numbers, flat.
        points: The kinks of each.
        margins: How far each is from the nearest one, and its last bits.
        positions: The decisions that are asked about.
        near: How far rounding reaches.
    """

    def __init__(
        self,
        value: torch.Tensor,
        points: Sequence[torch.Tensor],
        margins: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        near: float,
    ) -> None:
        self._value, self._points, (self._margins, self._units) = value, points, margins
        self._positions, self._near = positions, near
        numbers, margin = value[positions], self._margins[positions]
        # Beyond the nearest kink, by as much as there is to it, is the next region.
        self._ours = self._region(numbers, positions)
        beyond = torch.where(margin == 0, _next(numbers, up=margin == 0), numbers - 2 * margin)
        self._theirs = self._region(beyond, positions)
        # Of so many elements, where those of each region are that are beyond rounding.
        self._inside: dict[int, list[torch.Tensor]] = {}

    def turned_in(self, array: torch.Tensor) -> torch.Tensor | None:
        """Return which numbers are on the other side in another run.

        The array tells it if it is the same everywhere in each region, but where rounding reaches:
        a mask, or numbers that are compared with the kinks.
        """
        array = array.reshape(-1)
        if array.dtype == torch.bool:
            return self._of_mask(lambda where: array[where])
        found = None
        for point in self._points:

            def above(where: torch.Tensor, point: torch.Tensor = point) -> torch.Tensor:
                return array[where] > point[where]

            turned = self._of_mask(above)
            if turned is not None:
                turned &= self._is_near(array, point)
                found = turned if found is None else found | turned
        return found

    def _is_near(self, array: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
        """Return where an array is near a kink, too; everywhere if it is the same in each region.

        Other numbers may have the same signs.
        """
        parts = [array[inside] for inside in self._inside[_LOOKED_AT[0]]]
        if all(bool((part == part[0]).all()) for part in parts if len(part)):
            return torch.ones_like(self._positions, dtype=torch.bool)
        apart = (array[self._positions] - point[self._positions]).abs()
        return apart <= 2 * (self._near + self._units[self._positions])

    def _of_mask(self, mask: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        sides: list[int] | None = []
        for count in (*_LOOKED_AT, len(self._value)):
            sides = self._sides(mask, count)
            if sides is None:
                return None
            if count == _LOOKED_AT[-1] and -1 not in sides:
                break  # no region is so small that it needs all elements
        known = torch.tensor(sides)
        ours, theirs = known[self._ours], known[self._theirs]
        # Where nothing is in the next region, what is not as in this one is there.
        tells, turned = (ours >= 0) & (ours != theirs), mask(self._positions).long() != ours
        tells &= turned | (theirs >= 0)
        return tells & turned if bool(tells.any()) else None

    def _region(self, value: torch.Tensor, where: Any) -> torch.Tensor:
        """Return how many kinks are below each number."""
        return torch.stack([value > point[where] for point in self._points]).sum(0)

    def _sides(self, mask: Callable[[torch.Tensor], torch.Tensor], count: int) -> list[int] | None:
        """Return what a mask is in each region, -1 where nothing is; None if it is no mask."""
        if count not in self._inside:
            where = torch.arange(0, len(self._value), max(1, len(self._value) // count))
            where = where[self._margins[where].abs() > self._units[where] + self._near]
            regions = self._region(self._value[where], where)
            every = range(len(self._points) + 1)
            self._inside[count] = [where[regions == region] for region in every]
        found = []
        for inside in self._inside[count]:
            there = mask(inside)
            if bool(there.any()) != bool(there.all()) and len(there):
                return None
            found.append(int(there[0]) if len(there) else -1)
        return found


def _of_two(x: torch.Tensor, value: torch.Tensor, args: Any, kwargs: Any) -> CallDecisions | None:
    """Return the decisions of which of two numbers is larger."""
    other = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
    return None if other is None else _at(x, value, [torch.as_tensor(other)])


# -- windows ---------------------------------------------------------------------------------------


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
        return _windows(x, value, *rows, largest=largest)

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

    return _windows(x, value, rows(images, -torch.inf), rows(where, 0.0).long(), largest=True)


def _pair(value: Any) -> tuple[int, int]:
    values = [value] if isinstance(value, int) else list(value)
    return values[0], values[-1]


def _windows(
    x: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, where: torch.Tensor, *, largest: bool
) -> CallDecisions | None:
    if rows.shape[-1] < 2:
        return None
    best = rows.topk(2, dim=-1, largest=largest)
    places = where.gather(-1, best.indices)
    margins = (best.values[:, 0] - best.values[:, 1]).abs()

    def turn(positions: torch.Tensor) -> None:
        first, second = places[positions].T
        _write(x, second, _next(x[_place(x, first)], up=torch.tensor(largest)))

    def other_run(positions: torch.Tensor, near: float) -> OtherRun:
        first, second = places[positions].T
        clear = (margins > units + near).nonzero()[:, 0]
        clear = clear[:: max(1, len(clear) // _LOOKED_AT[-1])]

        def turned_in(array: torch.Tensor) -> torch.Tensor | None:
            numbers = array.reshape(-1)
            numbers = numbers.char() if array.dtype == torch.bool else numbers
            # The numbers themselves, or a mask of the largest ones.
            one, other = (numbers[part] for part in places[clear].T)
            if not (bool((one > other).all()) or bool((one < other).all())):
                return None
            ahead = numbers[second] - numbers[first]
            ahead = ahead if bool((one > other).all()) else -ahead
            return (ahead > 0) | ((ahead == 0) & (second < first))

        return turned_in

    units = _units(best.values[:, 0], x.dtype)
    return CallDecisions(margins, units, places[:, 0], turn, other_run)


def _units(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.abs() * (_BITS * torch.finfo(dtype).eps)


def _write(x: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    # `data` has a count of writes of its own: what an op has saved for backward stays usable.
    x.data[_place(x, positions)] = values


def _place(x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.unravel_index(positions, x.shape)


def _next(value: torch.Tensor, *, up: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(value, torch.where(up, torch.inf, -torch.inf).to(value.dtype))


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
