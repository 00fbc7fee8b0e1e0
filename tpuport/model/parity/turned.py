"""Eager PyTorch with the decisions of a port: a number that rounding takes over a kink is on the
side that it is on there.

What a program keeps for its backward pass tells them: masks, and numbers that are compared. A
decision is turned only if rounding explains it, which a run in float64 shows.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tpuport.model.parity.decisions import CallDecisions, SavedCopy, decisions, memory_of, reach
from tpuport.model.parity.float64 import Float64


class KeptArrays:
    """What a program keeps for its backward pass, by shape.

    Blocks in a loop keep one array for all of them: each of its parts counts.
    """

    def __init__(self, arrays: Iterable[Any]) -> None:
        self._by_shape: dict[tuple[int, ...], list[tuple[Any, Any]]] = {}
        for array in arrays:
            dtype = getattr(array, "dtype", None)
            if dtype == jnp.bool_ or (dtype is not None and jnp.issubdtype(dtype, jnp.floating)):
                shape = tuple(array.shape)
                self._by_shape.setdefault(shape, []).append((array, ...))
                parts = self._by_shape.setdefault(shape[1:], []) if shape else []
                parts += [(array, index) for index in range(shape[0] if len(shape) > 1 else 0)]

    def __bool__(self) -> bool:
        return bool(self._by_shape)

    def count(self, shape: tuple[int, ...]) -> int:
        """Return how many arrays of a shape there are."""
        return len(self._by_shape.get(shape, ()))

    def is_mask(self, shape: tuple[int, ...], index: int) -> bool:
        """Return whether one of the arrays of a shape is of bools."""
        return self._by_shape[shape][index][0].dtype == jnp.bool_

    def array(self, shape: tuple[int, ...], index: int) -> torch.Tensor:
        """Return one of the arrays of a shape, in the order in which the program made them."""
        array, part = self._by_shape[shape][index]
        plain = array.dtype in (jnp.bool_, jnp.float32, jnp.float64)
        held = np.asarray(array if plain else array.astype(jnp.float32))[part]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of memory that may not be written to: nobody does
            return torch.from_numpy(held)


class ToldDecisions:
    """The decisions of one run of a program, as what it kept tells them."""

    def __init__(self, kept: KeptArrays) -> None:
        self._kept = kept
        self._used: set[Any] = set()

    def turned(
        self, made: CallDecisions, shape: tuple[int, ...], positions: torch.Tensor, far: float
    ) -> torch.Tensor | None:
        """Return which decisions fall the other way in the program; None if nothing tells.

        Several ops may have equal masks: the first array that was not used yet is this one's.

        Args:
            made: The decisions of the next call of an op that decides.
            shape: That of what it decides on.
            positions: The open ones.
            far: How far rounding reaches.
        """
        other_run = made.other_run(positions, far)
        keys = [(shape, index) for index in range(self._kept.count(shape))]
        for key in sorted(keys, key=lambda key: (key in self._used, not self._kept.is_mask(*key))):
            found = other_run(self._kept.array(*key))
            if found is not None:
                self._used.add(key)
                return found
        return None


@dataclass(frozen=True)
class CallSamples:
    """A call of an op that decides.

    Attributes:
        form: The op, and the shape of what it decides on.
        margins: How far some of its numbers are from their kinks.
        ties: Which numbers are at a kink exactly, if any are.
    """

    form: tuple[str, tuple[int, ...]]
    margins: torch.Tensor
    ties: torch.Tensor | None


class Margins(TorchDispatchMode):
    """A mode that records samples of the decisions of a run in float64.

    Args:
        wide: The mode that has the values in float64.

    Attributes:
        calls: The calls that decide, in order.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, wide: Float64) -> None:
        super().__init__()
        self._wide = wide
        self.calls: list[CallSamples] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            made = decisions(func, args, kwargs, self._wide.value)
            if made is not None:
                self.calls.append(CallSamples(_form(func, args), made.samples, made.ties))
        return func(*args, **kwargs)


class Turned(TorchDispatchMode):
    """A mode in which eager PyTorch takes the decisions of a port, where they are open.

    Open is a decision whose number is within what rounding moves the numbers of the call by. One
    that is at the kink exactly in float64 is not open.

    Args:
        kept: What the port kept for its backward pass.
        exact: The decisions of a run in float64.
        wide: The mode that has the values in float64, if this run is in float64, too.
        reaches: How far rounding reaches, by call, if it is known: in a run in float64.

    Attributes:
        count: How many decisions were turned.
        reaches: As given, or found.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(
        self,
        kept: KeptArrays,
        exact: Sequence[CallSamples],
        *,
        wide: Float64 | None = None,
        reaches: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self._told, self._exact, self._wide = ToldDecisions(kept), exact, wide
        self._known = reaches
        self.reaches: list[float] = []
        self.count = 0
        self._calls = 0
        # The memory that the run has made itself: nothing else is written to.
        self._own: set[int] = set()
        self._saved = SavedCopy()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            made = decisions(func, args, kwargs, self._value)
            if made is not None:
                self._take(_form(func, args), args[0], made)
        result = func(*args, **kwargs)
        self._saved.note(func, args, result)
        given = {0, *(memory_of(leaf) for leaf in tree_leaves((args, kwargs)))}
        self._own |= {memory_of(leaf) for leaf in tree_leaves(result)} - given
        return result

    def _value(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._wide is None else self._wide.value(x)

    def _take(self, form: Any, x: torch.Tensor, made: CallDecisions) -> None:
        number, self._calls = self._calls, self._calls + 1
        if number >= len(self._exact) or self._exact[number].form != form:
            self._calls = len(self._exact)  # the run takes another way from here
            return
        if self._known is None:
            self.reaches.append(reach(made.samples, self._exact[number].margins))
            far = self.reaches[number]
        else:
            far = self._known[number] if number < len(self._known) else 0.0
        positions = made.open(far, self._exact[number].ties)
        if not len(positions) or memory_of(x) not in self._own:
            return
        turned = self._told.turned(made, tuple(x.shape), positions, far)
        if turned is not None and bool(turned.any()):
            made.turn(positions[turned])
            self._saved.update(x)
            self.count += int(turned.sum())


def _form(func: Any, args: Any) -> tuple[str, tuple[int, ...]]:
    return str(func), tuple(args[0].shape)
