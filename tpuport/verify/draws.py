"""The random numbers that programs draw, drawn by eager PyTorch too, over all calls of a script.

A program draws from a key, and takes one number for that from torch's generator at each call. Eager
PyTorch takes every number from the generator. So a model that draws in its forward pass has other
numbers in a port, and after it so has the script, as the generator is in another state. The ported
run notes its programs; eager PyTorch then draws in the same calls from the same keys, and takes
from the generator what the port takes. All else that a script draws is equal by itself.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch

from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import installed
from tpuport.model.parity.same_numbers import SameNumbers
from tpuport.model.parity.uncheckpointed import Uncheckpointed
from tpuport.tracing.core.keys import fresh_key, next_key, unused_key
from tpuport.tracing.core.reentrancy import part_of_program
from tpuport.tracing.patches.manual_seed import ManualSeed
from tpuport.tracing.patches.tensor_subclass import TensorSubclass
from tpuport.tracing.patches.truncated_normal import TruncatedNormal

NOTED, REPLAYED = "tpuport.verify.draws:noted", "tpuport.verify.draws:replayed"
_FILE, _RESULT, _CAUGHT = "draws.json", "replay.json", "caught.json"


@dataclass(frozen=True)
class DrawnCall:
    """A call that was a program: the class, the method, and the key that it drew from, if any."""

    name: str
    method: str
    key: list[int] | None


def _name(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _numbers(key: jax.Array) -> list[int]:
    return jax.random.key_data(key).tolist()


@contextlib.contextmanager
def noted(settings: dict[str, Any]) -> Iterator[None]:
    """Note the programs that run in the block, for `replayed`, and the errors that are caught."""
    calls: list[DrawnCall] = []

    def note(module: torch.nn.Module, method: str, key: jax.Array | None) -> None:
        drawn = None if key is None or key is unused_key() else _numbers(key)
        calls.append(DrawnCall(_name(module), method, drawn))

    porting = active()
    assert porting is not None
    porting.hooks.after = note
    try:
        yield
    finally:  # the script is stopped by an exception
        porting.hooks.after = None
        text = json.dumps([vars(call) for call in calls])
        Path(settings["folder"], _FILE).write_text(text)
        caught = json.dumps([str(one) for one in porting.report.caught])
        Path(settings["folder"], _CAUGHT).write_text(caught)


def caught_errors(folder: Path) -> list[str]:
    """Return the errors of programs that the script of a run caught."""
    file = folder / _CAUGHT
    return json.loads(file.read_text()) if file.exists() else []


class ProgramCalls:
    """Tells in a run of eager PyTorch which calls were programs of the port.

    A call that is not the next one that was a program is code around programs.
    """

    def __init__(self, calls: list[DrawnCall]) -> None:
        self.calls, self.done = calls, 0

    def next(self, module: torch.nn.Module, method: str) -> DrawnCall | None:
        """Return the program of a call that is made now; None if it was none."""
        expected = self.calls[self.done] if self.done < len(self.calls) else None
        if expected is None or (expected.name, expected.method) != (_name(module), method):
            return None
        self.done += 1
        return expected


class DrawReplay:
    """Runs the calls that were programs in eager PyTorch, on their random numbers."""

    def __init__(self, programs: ProgramCalls) -> None:
        self.programs = programs
        self.differs = ""

    def call(
        self, module: torch.nn.Module, method: str, original: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run a call that would be a program."""
        expected = self.programs.next(module, method)
        if expected is None:
            return original(module, *args, **kwargs)
        with part_of_program():
            if expected.key is None:
                return original(module, *args, **kwargs)
            numbers = SameNumbers(next_key())
            with installed((Uncheckpointed, ManualSeed, TensorSubclass, TruncatedNormal)), numbers:
                out = original(module, *args, **kwargs)
        if _numbers(fresh_key()) != expected.key and not self.differs:
            self.differs = f"call {self.programs.done} ({expected.name}.{method})"
        return out


@contextlib.contextmanager
def replayed(settings: dict[str, Any]) -> Iterator[None]:
    """Draw in the block what the programs drew that `noted` has written to `settings["draws"]`."""
    replay = DrawReplay(ProgramCalls(_read(Path(settings["draws"]))))
    porting = active()
    assert porting is not None
    porting.hooks.instead = replay.call
    try:
        yield
    finally:
        porting.hooks.instead = None
        left = len(replay.programs.calls) - replay.programs.done
        text = json.dumps({"differs": replay.differs, "left": left})
        Path(settings["folder"], _RESULT).write_text(text)


def count_programs(folder: Path) -> int:
    """Return how many calls of a run were programs."""
    return len(calls_of(folder))


def calls_of(folder: Path) -> list[DrawnCall]:
    """Return the calls of a run that were programs."""
    file = folder / _FILE
    return _read(file) if file.exists() else []


def _read(file: Path) -> list[DrawnCall]:
    return [DrawnCall(**call) for call in json.loads(file.read_text())]


def drew(folder: Path) -> Path | None:
    """Return the file of the programs of a run if one of them drew random numbers."""
    file = folder / _FILE
    return file if any(call.key is not None for call in calls_of(folder)) else None


def why_not_replayed(folder: Path) -> str:
    """Return why a run did not draw the numbers that the port drew; empty if it did."""
    file = folder / _RESULT
    if not file.exists():
        return "it failed"
    found = json.loads(file.read_text())
    if found["differs"]:
        return f"the generator has another state from {found['differs']} on"
    return f"{found['left']} calls of the port were not met" if found["left"] else ""
