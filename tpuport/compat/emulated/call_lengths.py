"""Calls whose tensors are longer each time, and whose numbers count: one program for many lengths.

The loop of a sampler calls its model with a longer cache, mask or sequence each time, and with the
position of the token. The second of such calls shows what grows. From then on one program runs,
whose sizes are data, up to a power of two; past that, one for twice the length.
"""

import dataclasses
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from tpuport.foundation import pytree
from tpuport.foundation.interop import backend
from tpuport.foundation.pytree.sealed import apart
from tpuport.model.program_cache import CallArguments
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.state.lengths import Lengths, Seen, Steps, series

_SHORTEST = 64
_COUNT = "the count of lengths"
# If calls have had more numbers of samples than that, one program is for many numbers.
_SIZES_OF_BATCHES = 2
# Of a class that failed so often the other instances are not tried: layers of a model have one.
_MOST_FAILURES = 2


@dataclass
class _Form:
    """The calls of one method that differ in sizes and numbers only.

    Attributes:
        last: The one before.
        single: Those that have a program of their own.
        known: The lengths that have a program.
        tried: How many ways of making one have failed.
    """

    last: Seen
    single: set[Seen]
    known: list[Lengths] = field(default_factory=list)
    tried: int = 0


@dataclass(frozen=True)
class Fit:
    """A call in a series that grows.

    Attributes:
        form: The key of its form.
        lengths: The lengths of the series.
        count: The call's place in it.
        is_new: Whether there is no program for it yet.
        is_guess: Whether there was no such call before, and what grows is a guess.
    """

    form: Any
    lengths: Lengths
    count: int
    is_new: bool
    is_guess: bool = False

    @property
    def path(self) -> Any:
        """Return what tells the programs of one method apart."""
        return ("lengths", self.form, self.lengths)

    def arguments(self, leaves: list[Any], given: CallArguments) -> tuple[list[Any], CallArguments]:
        """Return the arguments of the program, with the count: those that grow in largest sizes."""
        values, metas = list(given.values), list(given.metas)
        growing = self.lengths.leaves
        for leaf, meta in enumerate(metas):
            if leaf in growing:
                largest = self.lengths.largest(leaf)
                values[leaf] = _padded(leaves[leaf], largest)
                metas[leaf] = _like(meta, largest)
            else:
                metas[leaf] = _with_small_gaps(meta)
        count = torch.tensor(self.count)
        values.append(backend.to_jax(count))
        metas.append(torch.empty((), dtype=torch.int64, device="meta"))
        spec = dataclasses.replace(given.spec, key=self.path)
        paths = [*given.paths, _COUNT]
        return [*leaves, count], CallArguments(values, metas, paths, spec, self.lengths)


class CallLengths:
    """The sizes and numbers of the calls of one module, by method and structure.

    Args:
        owner: The class of the module.
    """

    failures: ClassVar["weakref.WeakKeyDictionary[type, int]"] = weakref.WeakKeyDictionary()

    def __init__(self, owner: type) -> None:
        self._forms: dict[Any, _Form] = {}
        self._owner = owner
        # By method the sizes of the last call, by the paths of its arguments.
        self._before: dict[str, dict[str, tuple[int, ...]]] = {}

    def fit(
        self, method: str, leaves: list[Any], spec: pytree.TreeSpec, paths: list[str]
    ) -> Fit | None:
        """Return the series that a call belongs to; None if it is compiled as it is."""
        # Otherwise the emulated device would answer.
        with torch._C.DisableTorchFunction():
            return self._fit(method, leaves, spec, paths)

    def _fit(
        self, method: str, leaves: list[Any], spec: pytree.TreeSpec, paths: list[str]
    ) -> Fit | None:
        if not all(map(_is_plain, leaves)):
            return None
        key, statics = apart(spec)
        # By `repr`, as 0.0 equals -0.0.
        known = tuple(v if type(v) is int else repr(v) for v in statics)
        seen = Seen(tuple(tuple(torch.Tensor.size(leaf)) for leaf in leaves), known)
        kinds = tuple((leaf.dtype, leaf.dim()) for leaf in leaves)
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        form_key = method, key, kinds, modes
        before = self._before.get(method, {})
        self._before[method] = dict(zip(paths, seen.sizes, strict=True))
        form = self._forms.get(form_key)
        if form is None:
            guess = _guess(before, paths, seen)
            self._forms[form_key] = _Form(seen, {seen} if guess is None else set())
            count = None if guess is None else guess.count(seen)
            if guess is None or count is None:
                return None
            return Fit(form_key, guess, count, is_new=True, is_guess=True)
        last, form.last = form.last, seen
        if seen in form.single:
            return None
        fit = self._in_series(form_key, form, last, seen)
        if fit is None:
            form.single.add(seen)
        return fit

    def _in_series(self, form_key: Any, form: _Form, last: Seen, seen: Seen) -> Fit | None:
        for one in sorted(form.known, key=lambda one: one.high):
            count = one.count(seen)
            if count is not None:
                return Fit(form_key, one, count, is_new=False)
        # The last batch of a data set is smaller; where there are three sizes, there are more.
        found = series(last, seen, samples=len(form.single) >= _SIZES_OF_BATCHES)
        ways = [] if found is None else list(_ways(found, seen))
        has_failed = self.failures.get(self._owner, 0) >= _MOST_FAILURES and not form.known
        if form.tried >= len(ways) or has_failed:
            return None
        lengths = ways[form.tried]
        count = lengths.count(seen)
        return None if count is None else Fit(form_key, lengths, count, is_new=True)

    def again(self, fit: Fit) -> Fit | None:
        """Return another way to make a program for a call, whose first one failed."""
        form = self._forms[fit.form]
        if fit.is_guess:
            form.single.add(form.last)
            return None
        form.tried += 1
        ways = list(_ways(fit.lengths, form.last))
        if form.tried >= len(ways):
            self.failures[self._owner] = self.failures.get(self._owner, 0) + 1
            return None
        lengths = ways[form.tried]
        count = lengths.count(form.last)
        return None if count is None else Fit(fit.form, lengths, count, is_new=True)

    def keep(self, fit: Fit) -> None:
        """Note that a series has a program."""
        if fit.is_new:
            self._forms[fit.form].known.append(fit.lengths)


def _guess(before: dict[str, tuple[int, ...]], paths: list[str], seen: Seen) -> Lengths | None:
    """Guess what grows from the first call with a cache on, None if nothing seems to.

    A sampler calls its model with a prompt, and then with a token and a cache that is as long as
    the prompt. If something else grows, too, later calls are no part of this series.
    """
    lengths: set[int] = set()
    for path, now in zip(paths, seen.sizes, strict=True):
        was = before.get(path, ())
        if len(was) == len(now):
            lengths |= {a for a, b in zip(was, now, strict=True) if a > b}
    sizes = tuple(
        ((leaf, dim), Steps(size, 1))
        for leaf, known in enumerate(seen.sizes)
        if paths[leaf] not in before
        for dim, size in enumerate(known)
        if dim and size in lengths
    )
    return next(_ways(Lengths(seen, sizes, (), 0, 0), seen)) if sizes else None


def _ways(lengths: Lengths, seen: Seen) -> Iterator[Lengths]:
    """Yield the ranges to try for a series that a call belongs to.

    The first one has room. Where the code's own tables are short, or it does something else for
    small numbers, a closer one may be right.
    """
    sizes = [one for _, one in lengths.sizes]
    # A position is smaller than a length.
    numbers = [dataclasses.replace(one, start=one.start + 1) for _, one in lengths.numbers]
    every = [*sizes, *numbers]
    at = every[0].count(_value(lengths, seen)) or 0
    longest = max(one.at(at) for one in every)
    close = 1 << longest.bit_length()
    lowest = max(-((one.start - 1) // one.step) for one in every)
    counts_samples = any(dim == 0 and len(seen.sizes[leaf]) > 1 for (leaf, dim), _ in lengths.sizes)
    room = close if counts_samples else max(_SHORTEST, close)
    for low, most in ((lowest, room), (at, close)):
        high = min((most - one.start) // one.step for one in every)
        yield _from(lengths, low, high)


def _value(lengths: Lengths, seen: Seen) -> int:
    if lengths.sizes:
        (leaf, dim), _ = lengths.sizes[0]
        return seen.sizes[leaf][dim]
    return seen.statics[lengths.numbers[0][0]] + 1


def _from(lengths: Lengths, low: int, high: int) -> Lengths:
    """Return the same series, counted from `low`."""

    def moved(steps: Any) -> Any:
        return dataclasses.replace(steps, start=steps.at(low))

    return dataclasses.replace(
        lengths,
        sizes=tuple((at, moved(steps)) for at, steps in lengths.sizes),
        numbers=tuple((at, moved(steps)) for at, steps in lengths.numbers),
        low=0,
        high=high - low,
    )


def _is_plain(leaf: Any) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, TracedTensor)
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
    )


def _padded(leaf: torch.Tensor, sizes: tuple[int, ...]) -> Any:
    """Return a tensor as the start of an array of larger sizes.

    torch pads it, as XLA would compile a program for each length.
    """
    with torch._C.DisableTorchFunction(), torch.no_grad():
        made = torch.zeros(sizes, dtype=leaf.dtype)
        made[tuple(slice(0, size) for size in leaf.shape)] = leaf
        return backend.to_jax(made)


def _like(meta: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return a meta tensor of other sizes, whose dims follow one another in memory as they did."""
    order = sorted(range(meta.dim()), key=lambda dim: (-meta.stride(dim), dim))
    made = torch.empty([sizes[dim] for dim in order], dtype=meta.dtype, device="meta")
    return made.permute([order.index(dim) for dim in range(meta.dim())])


def _with_small_gaps(meta: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the strides of a part of the smallest possible tensor.

    How large the tensor is that an argument is a part of does not matter.
    """
    sizes, known = meta.shape, meta.stride()
    strides, extent, before = [0] * meta.dim(), 1, 1
    for dim in sorted(range(meta.dim()), key=lambda dim: (known[dim], -dim)):
        if sizes[dim] != 1 and known[dim]:
            strides[dim] = extent if known[dim] == before else extent + 1
            extent, before = strides[dim] * sizes[dim], known[dim] * sizes[dim]
    for dim in reversed(range(meta.dim())):
        if sizes[dim] == 1:
            strides[dim] = 1 if dim + 1 == meta.dim() else strides[dim + 1] * sizes[dim + 1]
    return torch.empty_strided(tuple(sizes), strides, dtype=meta.dtype, device="meta")
