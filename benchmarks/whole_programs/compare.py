"""Two results compared: structure, dtypes, values, Python numbers, state."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

# What is no distance: of the largest element, by dtype.
_NOISE = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
_LEAST = 1e-5
# How much farther from float64 than eager PyTorch a port may be.
FACTOR = 4.0
# Of a module's attributes these are torch's own.
_TORCHS = frozenset(vars(nn.Module()))


def state(module: nn.Module) -> dict[str, Any]:
    """Return parameters, buffers and Python attributes by name."""
    found: dict[str, Any] = {}
    for prefix, one in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        found |= {dot + name: p for name, p in one._parameters.items() if p is not None}
        found |= {dot + name: b for name, b in one._buffers.items()}
        plain = {k: v for k, v in vars(one).items() if k not in _TORCHS}
        if type(one).__module__.startswith("torch."):
            plain = {}  # sizes and flags that no call changes
        found |= {dot + name: value for name, value in plain.items()}
    return found


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a structure by path, with the class and the keys of each container."""
    if isinstance(value, dict):
        items = [(f"{path}[{key!r}]", one) for key, one in value.items()]
        found: dict[str, Any] = {path: (type(value).__name__, *map(str, value))}
    elif isinstance(value, (list, tuple)):
        items = [(f"{path}[{index}]", one) for index, one in enumerate(value)]
        found = {path: (type(value).__name__, len(value))}
    else:
        return {path: value}
    for where, one in items:
        found |= flat(one, where)
    return found


class Difference(Exception):
    """Two results differ.

    Args:
        path: where.
        what: how.
        kind: "value", or "number" for a Python number, "structure" for anything else; "excepted" is
            a tensor for a Python number of this value or the reverse: docs/promises.md excepts it.
    """

    def __init__(self, path: str, what: str, kind: str = "structure") -> None:
        super().__init__(f"{path}: {what}")
        self.path, self.what, self.kind = path, what, kind


def equal(
    want: dict[str, Any], have: dict[str, Any], others: Sequence[dict[str, Any]] = ()
) -> None:
    """Compare results, by path.

    Args:
        want: eager PyTorch's.
        have: the port's.
        others: results of eager PyTorch in float64, with rounding errors put in: what they differ
            by is rounding.

    Raises:
        Difference: they differ.
    """
    for path, one in want.items():
        if path not in have:
            raise Difference(path, "in eager only")
        _equal_leaf(path, one, have[path], [other[path] for other in others if path in other])
    for path in have.keys() - want.keys():
        raise Difference(path, "in the port only")


def _equal_leaf(path: str, want: Any, have: Any, others: list[Any]) -> None:
    if isinstance(want, torch.Tensor) and isinstance(have, torch.Tensor):
        _equal_tensors(path, want.detach(), have.detach(), others)
        return
    if type(want) is not type(have):
        what = f"{type(have).__name__} {have!r:.60} for {type(want).__name__} {want!r:.60}"
        raise Difference(path, what, "excepted" if _is_number(want, have) else "structure")
    if isinstance(want, float):
        close = math.isclose(want, have, rel_tol=1e-5, abs_tol=1e-6)
        inside = any(
            isinstance(o, float) and math.isclose(o, have, rel_tol=1e-5, abs_tol=1e-6)
            for o in others
        )
        if not (close or inside or (want != want and have != have) or _within(want, have, others)):
            raise Difference(path, f"{have!r} for {want!r}", "number")
    elif want != have and not any(other != want for other in others):
        raise Difference(path, f"{have!r:.60} for {want!r:.60}", "number")


def _is_number(want: Any, have: Any) -> bool:
    """Return whether one of two values is a Python number and the other a tensor of that number."""
    tensors = [one for one in (want, have) if isinstance(one, torch.Tensor)]
    numbers = [one for one in (want, have) if type(one) in (bool, int, float)]
    return len(tensors) == len(numbers) == 1 and not tensors[0].dim() and tensors[0] == numbers[0]


def _within(want: float, have: float, others: list[Any]) -> bool:
    spread = max([abs(float(o) - want) for o in others if isinstance(o, (int, float))], default=0.0)
    return abs(have - want) <= FACTOR * spread


def _equal_tensors(path: str, want: torch.Tensor, have: torch.Tensor, others: list[Any]) -> None:
    if want.dtype != have.dtype or want.shape != have.shape:
        raise Difference(path, f"{have.dtype}{list(have.shape)} for {want.dtype}{list(want.shape)}")
    if not want.numel():
        return
    others = [o for o in others if isinstance(o, torch.Tensor) and o.shape == want.shape]
    if not want.is_floating_point():
        if not torch.equal(want, have) and all(torch.equal(want, o.to(want.dtype)) for o in others):
            raise Difference(path, f"{_few(have)} for {_few(want)}", "value")
        return
    limit = _NOISE.get(want.dtype, _LEAST)
    w, h = want.double().numpy(), have.double().numpy()
    near = [o.double().numpy() for o in others]
    finite = np.isfinite(w)
    for o in near:  # where rounding decides whether a value is finite, nothing is compared
        finite = finite & np.isfinite(o)
    odd = ~np.isfinite(w)
    for o in near:
        odd = odd & ~np.isfinite(o)
    if not np.array_equal(np.nan_to_num(w[odd], nan=7.0), np.nan_to_num(h[odd], nan=7.0)) or (
        not np.isfinite(h[finite]).all()
    ):
        raise Difference(path, f"{_few(have)} for {_few(want)}", "value")
    if not finite.any():
        return
    scale = max(float(np.abs(w[finite]).max()), 1e-2)
    spread = max([float(np.abs(o - w)[finite].max()) for o in near], default=0.0)
    error = float(np.abs(h - w)[finite].max())
    if error > limit * scale + FACTOR * spread:
        raise Difference(
            path, f"off by {error:.1e} of {scale:.1e}: {_few(have)} for {_few(want)}", "value"
        )


def _few(tensor: torch.Tensor) -> str:
    return str([round(v, 5) if isinstance(v, float) else v for v in tensor.flatten()[:12].tolist()])
