"""Two Python structures side by side: their tensors in pairs, and what differs in all else."""

import datetime
import enum
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from tpuport.foundation import pytree
from tpuport.foundation.pytree.compare import same_class, same_value
from tpuport.tracing.control_flow.merge import is_exact, is_like
from tpuport.tracing.core.export import to_torch

# Python values that are compared; of other objects, such as functions, only the class.
_COMPARED = (
    *(type(None), bool, int, float, complex, str, bytes, slice, range),
    *(datetime.date, datetime.time, datetime.timedelta, uuid.UUID),
    *(torch.dtype, torch.device, torch.Size, enum.Enum, np.ndarray, np.generic),
)
_LONGEST = 60


@dataclass(frozen=True)
class Pair:
    """The same place in two structures.

    Attributes:
        path: How code reaches it, such as `output.logits`.
        want: Eager PyTorch's tensor, array or number there.
        have: The port's.
        problem: How the two differ, if they cannot be compared as tensors.
    """

    path: str
    want: Any = None
    have: Any = None
    problem: str = ""


def pairs(expected: Any, got: Any, path: str) -> list[Pair]:
    """Return the places with tensors, and those where anything else differs.

    Compared are classes of containers, keys, lengths, which places hold one and the same tensor,
    and by class and value None, bools, integers, strings, dtypes, enums and numpy arrays. A Python
    float is like a tensor without dims: code may have read it from one. A class that code makes in
    each call differs each time, and is compared by what made it.
    """
    ours, theirs = (pytree.flatten(value, leaf=comparable) for value in (expected, got))
    walker = _Walker(ours[0], theirs[0])
    return list(walker.walk(ours[1].node, theirs[1].node, path))


def comparable(value: Any) -> bool:
    """Return whether a value is compared element by element."""
    return isinstance(value, (torch.Tensor, jax.Array))


def as_tensor(value: Any) -> torch.Tensor:
    """Return a tensor, array or Python number as a plain CPU tensor."""
    if isinstance(value, (float, complex)):
        wide = torch.float64 if isinstance(value, float) else torch.complex128
        return torch.tensor(value, dtype=wide)
    return to_torch(value).detach()


class _Walker:
    def __init__(self, ours: list[Any], theirs: list[Any]) -> None:
        self.ours, self.theirs = ours, theirs
        self.met: dict[int, str] = {}
        self.same: dict[int, int] = {}

    def walk(self, want: Any, have: Any, path: str) -> Iterator[Pair]:
        """Compare two nodes of `pytree.TreeSpec`."""
        if want[0] == have[0] == "leaf":
            yield from self._leaves(want[1], have[1], path)
        elif want[0] == have[0] == "node":
            yield from self._nodes(want[2], have[2], path)
        elif want[0] == have[0] == "static":
            yield from _statics(want[1], have[1], path)
        elif want[0] == have[0] == "array":
            yield from _statics(want[2], have[2], path)
        elif want[0] == "static" and have[0] == "leaf" and self._may_be(have[1], want[1]):
            # docs/promises.md: on some path it is a number, on another a tensor.
            tensor = self.theirs[have[1]]
            yield Pair(path, torch.tensor(want[1], dtype=tensor.dtype), tensor)
        elif want[:2] != have[:2]:
            yield _unlike(path, self._words(want, self.ours), self._words(have, self.theirs))

    def _leaves(self, want: int, have: int, path: str) -> Iterator[Pair]:
        known = self.same.get(want)
        if known is None and have not in self.same.values():
            self.same[want] = have
            self.met[want] = self.met[~have] = path
            yield Pair(path, self.ours[want], self.theirs[have])
        elif known != have:
            first = self.met.get(want) or self.met[~have]
            only = "eager PyTorch" if known is not None else "the port"
            yield Pair(path, problem=f"the same tensor as {first} in {only} only")

    def _may_be(self, index: int, number: Any) -> bool:
        """Return whether the port's tensor stands for a Python number of this kind too."""
        tensor = self.theirs[index]
        is_same = is_like(tensor, type(number)) or is_exact(tensor, number)
        return getattr(tensor, "_or_number", False) and is_same

    def _nodes(self, want: Any, have: Any, path: str) -> Iterator[Pair]:
        if not same_class(want.kind, have.kind):
            yield _unlike(path, f"a {want.kind.__name__}", f"a {have.kind.__name__}")
            return
        is_alike = want.equal_keys == have.equal_keys
        is_alike &= want.known_by_identity == have.known_by_identity
        if not is_alike or len(want.parts) != len(have.parts):
            yield _unlike(path, _shown(want), _shown(have))
            return
        if issubclass(want.kind, (set, frozenset)):
            ours, theirs = (sorted(map(self._member, c.parts)) for c in (want, have))
            if ours != theirs:
                yield _unlike(path, str(ours), str(theirs))
            return
        steps = want.steps()
        for step, ours, theirs in zip(steps, want.parts, have.parts, strict=True):
            yield from self.walk(ours, theirs, path + step)
        for i in want.known_by_identity:
            yield from self.walk(want.keys[i], have.keys[i], f"{path}[key {i}]")
        for name, ours in want.held.items():
            if name in have.held:
                yield from self.walk(ours, have.held[name], f"{path}.{name}")
            else:
                yield Pair(f"{path}.{name}", problem="only eager PyTorch has it")
        for name in have.held.keys() - want.held.keys():
            yield Pair(f"{path}.{name}", problem="only the port has it")

    def _member(self, node: Any) -> str:
        """Return what a member of a set is; the order of tensors in it is any."""
        return "a tensor" if node[0] == "leaf" else _value(node[1])

    def _words(self, node: Any, leaves: list[Any]) -> str:
        tag, what = node[:2]
        if tag == "leaf":
            return f"{str(leaves[what].dtype).removeprefix('torch.')}{list(leaves[what].shape)}"
        if tag == "node":
            return f"a {node[2].kind.__name__}"
        if tag == "static_new":
            return f"an empty {what.__name__}"
        return _value(what) if tag == "static" else "an object that is elsewhere too"


def _statics(want: Any, have: Any, path: str) -> Iterator[Pair]:
    if isinstance(want, np.generic) and type(have) is type(want.item()):
        # docs/promises.md: numpy's functions of numbers of the program give Python's numbers.
        want = want.item()
    if not same_class(type(want), type(have)):
        yield _unlike(path, _value(want), _value(have))
    elif isinstance(want, (float, complex)):
        yield Pair(path, want, have)
    elif isinstance(want, np.ndarray):
        same = want.dtype == have.dtype and want.shape == have.shape
        if not same or (want.dtype != object and want.tobytes() != have.tobytes()):
            yield _unlike(path, _value(want), _value(have))
    elif isinstance(want, _COMPARED) and not same_value(want, have):
        yield _unlike(path, _value(want), _value(have))


def _unlike(path: str, want: str, have: str) -> Pair:
    return Pair(path, problem=f"{have} where eager PyTorch gives {want}")


def _value(value: Any) -> str:
    if not isinstance(value, _COMPARED):
        return f"a {type(value).__name__}"
    text = repr(value)
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    plain = value is None or isinstance(value, (str, enum.Enum, torch.dtype, np.ndarray))
    return text if plain else f"{type(value).__name__} {text}"


def _shown(content: Any) -> str:
    if content.keys is not None:
        return f"a {content.kind.__name__} with the keys {content.equal_keys}"
    return f"a {content.kind.__name__} of {len(content.parts)}"
