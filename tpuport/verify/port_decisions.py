"""The decisions of a ported run, for the runs of eager PyTorch that are to take them.

What a program keeps for its backward pass tells on which side of a kink each number is: masks, and
numbers that are compared. The ported run writes it for each call, as far as there is room, and a
run of eager PyTorch reads it at the same call. A decision is taken only where rounding explains it,
which a run in float64 shows.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import installed
from tpuport.model.parity.decisions import CallDecisions, reach
from tpuport.model.parity.turned import KeptArrays, ToldDecisions
from tpuport.model.parity.uncheckpointed import Uncheckpointed
from tpuport.tracing.core.reentrancy import part_of_program
from tpuport.verify.draws import ProgramCalls, calls_of

KEPT = "tpuport.verify.port_decisions:kept"
# The folder, in that of the ported run, and what a run in float64 writes beside its decisions.
FOLDER, TIES = "kept", "ties.safetensors"
# So much of one run is written: masks first, of each call.
_MOST_BYTES = 1 << 30
# If more of a call are open, by number and share, the runs have drifted apart over some steps: then
# how far they are from each other says nothing of rounding.
_FEW, _SHARE = 16, 0.01


class KeptFiles:
    """Writes what programs keep, a file for each call."""

    def __init__(self, folder: Path, most: int = _MOST_BYTES) -> None:
        self._folder, self._left, self._number = folder, most, 0
        self._arrays: list[Any] = []
        folder.mkdir()

    def take(self, arrays: list[Any]) -> None:
        """Take what a program keeps, ahead of `next`."""
        self._arrays = arrays

    def next(self) -> None:
        """Write what the next call kept, if it kept anything."""
        arrays, self._arrays = self._arrays, []
        number, self._number = self._number, self._number + 1
        held = [one for one in arrays if getattr(one, "ndim", 0) and one.size]
        masks = [_packed(np.asarray(one)) for one in held if one.dtype == jnp.bool_]
        floats = [one for one in held if jnp.issubdtype(one.dtype, jnp.floating)]
        size = sum(one.nbytes for one, _ in masks)
        if not held or size > self._left:
            return
        if size + sum(4 * one.size for one in floats) > self._left:
            floats = []
        every = masks + [_plain(one) for one in floats]
        parts = {str(index): array for index, (array, _) in enumerate(every)}
        forms = json.dumps([form for _, form in every])
        path = _file(self._folder, number)
        try:
            save_file(parts, path, {"forms": forms})
        except (OSError, SafetensorError):
            # The disk is full: of later calls, too, nothing is known.
            path.unlink(missing_ok=True)
            self._left = 0
        self._left -= sum(array.nbytes for array in parts.values())


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number}.safetensors"


def _packed(mask: np.ndarray) -> tuple[np.ndarray, list[Any]]:
    return np.packbits(mask, axis=None), ["mask", mask.shape]


def _plain(array: Any) -> tuple[np.ndarray, list[Any]]:
    wide = np.asarray(array.astype(jnp.float32))
    return np.ascontiguousarray(wide), ["numbers", wide.shape]


def _unpacked(bits: np.ndarray, count: int) -> np.ndarray:
    return np.unpackbits(bits, count=count).view(np.bool_)


@contextlib.contextmanager
def kept(settings: dict[str, Any]) -> Iterator[None]:
    """Write what the programs that run in the block keep."""
    porting = active()
    assert porting is not None
    files, before = KeptFiles(Path(settings["folder"], FOLDER)), porting.hooks.after

    def after(module: torch.nn.Module, method: str, key: Any) -> None:
        if before is not None:
            before(module, method, key)
        files.next()

    porting.hooks.after, porting.hooks.keeps = after, files.take
    try:
        yield
    finally:
        porting.hooks.after, porting.hooks.keeps = before, None


class StoredArray:
    """An array that a program kept, read when somebody looks at it."""

    def __init__(self, file: Path, name: str, form: Sequence[Any]) -> None:
        self._file, self._name = file, name
        self.shape = tuple(form[1])
        self.dtype = np.dtype(np.bool_ if form[0] == "mask" else np.float32)

    @cached_property
    def _value(self) -> np.ndarray:
        with safe_open(self._file, "np") as file:
            held = file.get_tensor(self._name)
        if self.dtype == np.bool_:
            held = _unpacked(held, int(np.prod(self.shape))).reshape(self.shape)
        return held

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._value, dtype, copy=copy)


def stored(folder: Path, number: int) -> list[StoredArray]:
    """Return what the program of a call kept, as far as that was written."""
    path = _file(folder, number)
    if not path.exists():
        return []
    with safe_open(path, "np") as file:
        forms = json.loads(file.metadata()["forms"])
    return [StoredArray(path, str(index), form) for index, form in enumerate(forms)]


@dataclass(frozen=True)
class TakenDecisions:
    """The decisions of a call that the port tells.

    Attributes:
        reach: How far rounding reaches.
        told: The positions that are open and of which it is known how they fall in the port.
        turned: Those that fall the other way there.
    """

    reach: float
    told: torch.Tensor
    turned: torch.Tensor


class PortDecisions:
    """Tells in a run of eager PyTorch how the decisions of its calls fall in the port.

    Args:
        kept: The folder of the ported run with what its programs kept.
        exact: That of a run in float64, which shows what rounding explains; None to take nothing.
        calls: Its decisions.
        reaches: How far rounding reaches, by call, if it is known: in a run in float64.
    """

    def __init__(
        self,
        kept: Path,
        exact: Path | None,
        calls: Sequence[dict[str, Any]],
        reaches: Sequence[float | None] | None = None,
    ) -> None:
        self._kept, self._exact, self._reaches = kept, calls, reaches
        self._ties = {} if exact is None else load_file(exact / TIES)
        self._programs = ProgramCalls(calls_of(kept.parent))
        self._outer: Any = None
        self._told: ToldDecisions | None = None
        # The memory that the current call has made itself: nothing else is written to.
        self.own: set[int] = set()

    @property
    def is_inside(self) -> bool:
        """Return whether a call runs of which the port's decisions are known."""
        return self._told is not None

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the calls in the block that were programs."""
        porting = active()
        assert porting is not None
        self._outer, porting.hooks.instead = porting.hooks.instead, self._call
        try:
            yield
        finally:
            porting.hooks.instead = self._outer

    def _call(
        self, module: torch.nn.Module, method: str, original: Any, args: Any, kwargs: Any
    ) -> Any:
        number = self._programs.done
        expected = self._programs.next(module, method)
        arrays = [] if expected is None else stored(self._kept, number)
        self._told = ToldDecisions(KeptArrays(arrays)) if arrays else None
        try:
            if self._outer is not None:
                return self._outer(module, method, original, args, kwargs)
            if expected is None:
                return original(module, *args, **kwargs)
            # A block that runs again in the backward pass would run without what is turned here.
            with part_of_program(), installed((Uncheckpointed,)):
                return original(module, *args, **kwargs)
        finally:
            self._told = None
            self.own.clear()

    def taken(
        self, number: int, func: Any, x: torch.Tensor, made: CallDecisions
    ) -> TakenDecisions | None:
        """Return which decisions of the next call of an op fall the other way in the port.

        Args:
            number: That of the call.
            func: The op.
            x: What it decides on.
            made: Its decisions.
        """
        if number >= len(self._exact):
            return None
        exact, shape = self._exact[number], tuple(x.shape)
        if (exact["op"], exact["shape"]) != (str(func), list(shape)):
            self._exact = []  # the run takes another way from here
            return None
        if self._reaches is None:
            far = reach(made.samples, torch.tensor(exact["samples"]))
        else:
            far = self._reaches[number] if number < len(self._reaches) else None
        if self._told is None or far is None:
            return None
        positions = made.open(far, self._ties_of(number, len(made.margins)))
        if len(positions) > max(_FEW, _SHARE * len(made.margins)):
            return None
        none = positions[:0]
        turned = self._told.turned(made, shape, positions, far) if len(positions) else None
        if turned is None:
            return TakenDecisions(far, none, none)
        return TakenDecisions(far, positions, positions[turned])

    def _ties_of(self, number: int, count: int) -> torch.Tensor | None:
        bits = self._ties.get(str(number))
        return None if bits is None else torch.from_numpy(_unpacked(bits, count))


def save_ties(folder: Path, ties: dict[int, torch.Tensor]) -> None:
    """Write which numbers of a run in float64 are at a kink exactly, by call."""
    packed = {str(number): np.packbits(mask.numpy()) for number, mask in ties.items()}
    save_file(packed, folder / TIES)
