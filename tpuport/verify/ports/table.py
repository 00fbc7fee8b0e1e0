"""Which weights of the original each leaf of a port holds, found by value, shape and name.

Every element of the original's state has a number. A leaf is an array of such numbers, whatever it
was transposed, split or merged from, so values, gradients and updates of the original come into the
leaf's layout by indexing.
"""

import difflib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tpuport.foundation.errors import UsageError

Layout = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
# A torch name, a function of the original's tensors by name, or None: not of the original.
Names = Mapping[str, "str | Layout | None"]

_SAMPLES = 256
_FEW = 3
_MOST_DIMS = 5
_SAME = {"kernel": "weight", "scale": "weight", "embedding": "weight", "w": "weight", "b": "bias"}
_SAME |= {"gamma": "weight", "beta": "bias", "mean": "running_mean", "var": "running_var"}
_IGNORED = {"params", "value", "batch_stats", "raw_value"}


class OriginalState:
    """The floating parameters and buffers of the original, numbered element by element."""

    def __init__(self, model: torch.nn.Module) -> None:
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self.values: dict[str, torch.Tensor] = {}
        self.ids: dict[str, torch.Tensor] = {}
        self.ties: dict[str, str] = {}
        self.trained: set[str] = set()
        self.size = 0
        first: dict[int, str] = {}
        for name, tensor in named:
            if not tensor.is_floating_point():
                continue
            self.values[name] = tensor.detach()
            if id(tensor) in first:
                self.ties[name] = first[id(tensor)]
                self.ids[name] = self.ids[self.ties[name]]
                continue
            first[id(tensor)] = name
            if tensor.requires_grad:
                self.trained.add(name)
            numbers = torch.arange(self.size, self.size + tensor.numel())
            self.ids[name] = numbers.reshape(tensor.shape)
            self.size += tensor.numel()
        self.own = [name for name in self.values if name not in self.ties]
        self.starts = np.array(
            [int(self.ids[n].min()) if self.ids[n].numel() else 0 for n in self.own]
        )
        self.flat = self.joined(self.values)

    def joined(self, values: Mapping[str, torch.Tensor | None]) -> np.ndarray:
        """Return values by name as one flat array; zeros where there is none."""
        parts = [
            np.zeros(self.values[name].numel())
            if values.get(name) is None
            else values[name].detach().double().reshape(-1).numpy()  # pyright: ignore[reportOptionalMemberAccess]
            for name in self.own
        ]
        return np.concatenate([np.zeros(0), *parts])

    def names_of(self, ids: np.ndarray) -> list[str]:
        """Return the names of the tensors that elements belong to, in the order of the state."""
        found = np.unique(np.searchsorted(self.starts, ids.reshape(-1), side="right") - 1)
        return [self.own[i] for i in found]


@dataclass(frozen=True)
class LeafSource:
    """Where a leaf comes from: tensors of the original, joined, or a part of one.

    Attributes:
        names: The tensors.
        join: `one`, `cat` or `stack`.
        dim: The dim along which they are joined.
        part: The number of equal parts, the dim that is divided, and which part.
    """

    names: tuple[str, ...]
    join: str = "one"
    dim: int = 0
    part: tuple[int, int, int] | None = None

    @property
    def code(self) -> str:
        """Return the code that takes it from `w`, the tensors by name."""
        names = ", ".join(f'w["{name}"]' for name in self.names)
        text = names if self.join == "one" else f"torch.{self.join}([{names}], {self.dim})"
        return text if self.part is None else "{}.chunk({}, {})[{}]".format(text, *self.part)

    def take(self, w: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the tensor."""
        parts = [w[name] for name in self.names]
        made = parts[0] if self.join == "one" else getattr(torch, self.join)(parts, self.dim)
        return made if self.part is None else made.chunk(*self.part[:2])[self.part[2]]


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Attributes:
        leaf: The leaf of the port.
        code: The expression that makes it of `w`, the tensors of the original by name.
        how: How it was found: `value`, `name` or `given`.
        ids: The number of each element of the leaf in the original's state.
        source: The tensors, unless the entry was given.
    """

    leaf: str
    code: str
    how: str
    ids: np.ndarray
    source: LeafSource | None = None


@dataclass
class Table:
    """The weights of a port beside those of the original.

    Attributes:
        entries: By leaf.
        unknown: Leaves for which nothing was found.
        extra: Leaves that are not of the original, as the caller says.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    def code(self) -> str:
        """Return the table as Python code, to be edited and given as `names`."""
        rows = [f'    "{e.leaf}": lambda w: {e.code},  # by {e.how}' for e in self.entries.values()]
        rows += [f'    "{leaf}": ...,  # not found' for leaf in self.unknown]
        return "\n".join(["names = {", *rows, "}"])


def find(state: OriginalState, leaves: Mapping[str, np.ndarray], names: Names) -> Table:
    """Find the tensors of the original that the leaves of a port hold.

    Args:
        state: The state of the original.
        leaves: The floating leaves of the port by path.
        names: What is known: a torch name, a function of the tensors by name, or None for a leaf
            that the original does not have.

    Raises:
        UsageError: `names` has a leaf or tensor that does not exist, or a shape that does not fit.
    """
    table = Table()
    for leaf in names:
        if leaf not in leaves:
            near = difflib.get_close_matches(leaf, leaves, 3, 0.3)
            raise UsageError(f"names has {leaf!r}, which is no leaf of the port. Near: {near}")
    finder = _Finder(state, leaves)
    for leaf, value in leaves.items():
        if leaf in names:
            known = names[leaf]
            if known is None:
                table.extra.append(leaf)
            else:
                table.entries[leaf] = _given(state, leaf, known, value)
            continue
        entry = finder.by_value(leaf, value)
        if entry is not None:
            table.entries[leaf] = entry
    finder.by_name(table)
    table.unknown = [n for n in leaves if n not in table.entries and n not in table.extra]
    order = {leaf: i for i, leaf in enumerate(leaves)}
    table.entries = dict(sorted(table.entries.items(), key=lambda item: order[item[0]]))
    return table


def _given(state: OriginalState, leaf: str, known: "str | Layout", value: np.ndarray) -> Entry:
    if isinstance(known, str):
        if known not in state.ids:
            near = difflib.get_close_matches(known, state.ids, 3, 0.3)
            raise UsageError(f"names[{leaf!r}] is {known!r}, which is not of the original: {near}")
        fits = list(_layouts(state, LeafSource((known,)), value.shape))
        if not fits:
            shape = list(state.ids[known].shape)
            raise UsageError(
                f"names[{leaf!r}]: {known} of shape {shape} does not fit {list(value.shape)}."
                " Give a function of the tensors by name, such as lambda w: w[...].T"
            )
        code, ids = _preferred(state, leaf, fits, value)
        return Entry(leaf, code, "given", ids, LeafSource((known,)))
    ids = known(state.ids)
    if tuple(ids.shape) != value.shape:
        raise UsageError(
            f"names[{leaf!r}] gives the shape {list(ids.shape)}; the leaf has {list(value.shape)}"
        )
    if ids.dtype != torch.int64 or (
        ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < state.size
    ):
        raise UsageError(
            f"names[{leaf!r}] may only choose and move elements (index, permute, reshape, cat)"
        )
    names = ", ".join(state.names_of(ids.numpy()))
    return Entry(leaf, f"...  # your function of {names}", "given", ids.numpy())


def _layouts(
    state: OriginalState, source: LeafSource, shape: tuple[int, ...]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the permutations and reshapes of a source that have a shape, as code and numbers."""
    base = source.take(state.ids).numpy()
    if base.size != int(np.prod(shape)):
        return
    if base.ndim > _MOST_DIMS:
        orders: Iterator[tuple[int, ...]] = iter([tuple(range(base.ndim))])
    else:
        orders = itertools.permutations(range(base.ndim))
    exact = []
    loose = []
    for order in orders:
        moved = base.transpose(order)
        code = source.code + _moved(order)
        if moved.shape == shape:
            exact.append((code, moved))
        else:
            loose.append((f"{code}.reshape({', '.join(map(str, shape))})", moved.reshape(shape)))
    yield from exact
    yield from loose


def _moved(order: tuple[int, ...]) -> str:
    if order == tuple(range(len(order))):
        return ""
    return ".T" if order == (1, 0) else f".permute{order}"


def _preferred(
    state: OriginalState, leaf: str, fits: list[tuple[str, np.ndarray]], value: np.ndarray
) -> tuple[str, np.ndarray]:
    """Return the layout with the leaf's values, or the one that its name lets expect."""
    for code, ids in fits:
        if _equal(state.flat[ids], value):
            return code, ids
    is_kernel = _tokens(leaf, raw=True)[-1:] == ["kernel"]
    if is_kernel:
        turned = ("permute(2, 3, 1, 0)", "permute(2, 1, 0)", "permute(2, 3, 4, 1, 0)", ".T")
        for code, ids in fits:
            if any(mark in code for mark in turned):
                return code, ids
    return fits[0]


def _equal(mine: np.ndarray, other: np.ndarray) -> bool:
    """Return whether a leaf has these values, rounded to its dtype."""
    return bool(np.array_equal(mine.astype(other.dtype), other, equal_nan=True))


def _tokens(name: str, *, raw: bool = False) -> list[str]:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    parts = [part for part in re.split(r"[\W_]+", spaced.lower()) if part]
    parts = [part for part in parts if part not in _IGNORED]
    if raw or not parts:
        return parts
    whole = re.split(r"[^\w]+", name)[-1]
    last = _SAME.get(whole, _SAME.get(parts[-1], parts[-1]))
    return [*parts[:-1], *last.split("_")]


class _Finder:
    def __init__(self, state: OriginalState, leaves: Mapping[str, np.ndarray]) -> None:
        self.state, self.leaves = state, leaves
        self.sorted: dict[Any, tuple[np.ndarray, np.ndarray]] = {}

    def by_value(self, leaf: str, value: np.ndarray) -> Entry | None:
        """Find the tensors that have a leaf's values."""
        flat = value.reshape(-1)
        if flat.size < 2 or bool((flat == flat[0]).all()):
            return None
        keys, order = self._sorted(value.dtype)
        places = np.unique(np.linspace(0, flat.size - 1, _SAMPLES).astype(int))
        wanted = flat[places].astype(np.float64)
        low, high = np.searchsorted(keys, wanted, "left"), np.searchsorted(keys, wanted, "right")
        hits: dict[str, int] = {}
        for a, b in zip(low, high, strict=True):
            if 0 < b - a <= 8:
                for name in self.state.names_of(order[a:b]):
                    hits[name] = hits.get(name, 0) + 1
        for source in self._sources(hits, flat.size, len(places)):
            for code, ids in _layouts(self.state, source, value.shape):
                if _equal(self.state.flat[ids], value):
                    return Entry(leaf, code, "value", ids, source)
        return self._in_any_order(leaf, value, keys, order)

    def _sorted(self, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        if dtype not in self.sorted:
            rounded = self.state.flat.astype(dtype).astype(np.float64)
            order = np.argsort(rounded, kind="stable")
            self.sorted[dtype] = rounded[order], order
        return self.sorted[dtype]

    def _sources(self, hits: dict[str, int], size: int, samples: int) -> Iterator[LeafSource]:
        """Yield the tensors, parts of one and joins of several that have a leaf's size."""
        state = self.state
        for name, count in sorted(hits.items(), key=lambda item: -item[1]):
            if count >= 0.9 * samples:
                yield from self._parts(name, size)
        several = tuple(n for n in state.own if hits.get(n, 0) >= min(_FEW, samples // 4))
        if len(several) > 1 and sum(state.ids[n].numel() for n in several) == size:
            yield from self._joins(several)

    def _parts(self, name: str, size: int) -> Iterator[LeafSource]:
        own = self.state.ids[name]
        if own.numel() == size:
            yield LeafSource((name,))
        elif own.numel() > size and own.numel() % size == 0:
            k = own.numel() // size
            for dim in (d for d in range(own.ndim) if own.shape[d] % k == 0):
                for which in range(k):
                    yield LeafSource((name,), part=(k, dim, which))

    def _joins(self, names: tuple[str, ...]) -> Iterator[LeafSource]:
        shapes = {self.state.ids[n].shape for n in names}
        if len(shapes) == 1:
            yield LeafSource(names, "stack")
        for dim in range(self.state.ids[names[0]].ndim):
            if len({(*s[:dim], *s[dim + 1 :]) for s in shapes}) == 1:
                yield LeafSource(names, "cat", dim)

    def _in_any_order(
        self, leaf: str, value: np.ndarray, keys: np.ndarray, order: np.ndarray
    ) -> Entry | None:
        """Find each element by itself, if no two elements of the original have its value."""
        wanted = value.astype(np.float64).reshape(-1)
        low, high = np.searchsorted(keys, wanted, "left"), np.searchsorted(keys, wanted, "right")
        if not bool((high - low == 1).all()):
            return None
        ids = order[low].reshape(value.shape)
        names = ", ".join(self.state.names_of(ids))
        return Entry(leaf, f"...  # elements of {names} in an order of their own", "value", ids)

    def by_name(self, table: Table) -> None:
        """Add the leaves that values do not tell: by their siblings first, then by their names."""
        for leaf in self._open(table):
            entry = self._like_sibling(table, leaf)
            if entry is not None:
                table.entries[leaf] = entry
        used = {name for e in table.entries.values() for name in self.state.names_of(e.ids)}
        free = [name for name in self.state.own if name not in used]
        pairs = []
        for leaf in self._open(table):
            for place, name in enumerate(free):
                if self.state.ids[name].numel() == self.leaves[leaf].size:
                    pairs.append((-self._likeness(leaf, name), place, leaf, name))
        for _, _, leaf, name in sorted(pairs):
            if leaf in table.entries or name in used:
                continue
            value = self.leaves[leaf]
            fits = list(_layouts(self.state, LeafSource((name,)), value.shape))
            code, ids = _preferred(self.state, leaf, fits, value)
            table.entries[leaf] = Entry(leaf, code, "name", ids, LeafSource((name,)))
            used.add(name)

    def _open(self, table: Table) -> list[str]:
        return [n for n in self.leaves if n not in table.entries and n not in table.extra]

    def _likeness(self, leaf: str, name: str) -> float:
        words = difflib.SequenceMatcher(None, _tokens(leaf), _tokens(name), False).ratio()
        letters = difflib.SequenceMatcher(
            None, "".join(_tokens(leaf)), "".join(_tokens(name)), False
        ).ratio()
        same = _equal(
            self.state.values[name].reshape(-1).double().numpy(), self.leaves[leaf].reshape(-1)
        )
        return words + letters + same

    def _like_sibling(self, table: Table, leaf: str) -> Entry | None:
        """Find a bias by the tensors that the kernel beside it holds."""
        stem, _, own = leaf.rpartition(".")
        if _SAME.get(own, own) != "bias":
            return None
        for other, entry in table.entries.items():
            if other.rpartition(".")[0] != stem or entry.source is None or other == leaf:
                continue
            names = tuple(re.sub(r"weight$", "bias", name) for name in entry.source.names)
            if any(n not in self.state.ids or n in entry.source.names for n in names):
                continue
            part = entry.source.part
            source = LeafSource(names, entry.source.join, 0, part and (part[0], 0, part[2]))
            for code, ids in _layouts(self.state, source, self.leaves[leaf].shape):
                return Entry(leaf, code, "name", ids, source)
        return None
