"""Random generators of the host: restored after tracing, and refused if the trace drew from one."""

import contextlib
import copy
import functools
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from tpuport.foundation import pytree
from tpuport.foundation.user_frames import is_inside
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.host_tape import Tape
from tpuport.tracing.core.speculation import RestartTrace, SpeculationLog
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.state.held_generators import HeldHostGenerator

_NUMPY = (np.random.Generator, np.random.RandomState)
GENERATORS = (*_NUMPY, random.Random, torch.Generator)


# These types hold no other objects.
_BARE = (torch.Tensor, np.ndarray, *pytree.ATOMS)
# For speed: frequent types of that kind, skipped by exact type, and containers, skipped if empty.
_PASSED = pytree.ATOMIC | {TracedTensor, torch.nn.Parameter}
_CONTAINERS = frozenset({dict, OrderedDict, list, set, tuple})


class _HostGenerator(NamedTuple):
    """A random generator of the host: its name in words, and how its state is read and set."""

    name: str
    state: Callable[[], Any]
    restore: Callable[[Any], object]


# Not by numpy's functions: `tracing/patches/host_draws.py` replaces them during a trace.
_NUMPYS: Any = np.random.mtrand._rand
_GLOBAL = (
    _HostGenerator("Python's `random`", random.getstate, random.setstate),
    _HostGenerator(
        "numpy's global random state", lambda: _NUMPYS.get_state(legacy=False), _NUMPYS.set_state
    ),
    _HostGenerator("torch's CPU generator", torch.get_rng_state, torch.set_rng_state),
)


def _sources(roots: list[Any]) -> list[Any]:
    """Find the random generators that modules and arguments refer to."""

    def parts(value: Any) -> list[Any]:
        if isinstance(value, _BARE):
            return []
        return [
            part
            for part in pytree.children(value).all
            if type(part) not in _PASSED and (type(part) not in _CONTAINERS or part)
        ]

    found = pytree.walk(roots, parts)
    # What stands for one draws from that, which is among the roots.
    found = [value for value in found if type(value) is not HeldHostGenerator]
    return [value for value in found if isinstance(value, GENERATORS)]


def _of(source: Any) -> _HostGenerator:
    if isinstance(source, np.random.Generator):
        bits: Any = source.bit_generator
        return _HostGenerator(
            "a numpy random Generator",
            lambda: bits.state,
            lambda state: setattr(bits, "state", state),
        )
    if isinstance(source, np.random.RandomState):
        return _HostGenerator(
            "a numpy RandomState", lambda: source.get_state(legacy=False), source.set_state
        )
    if isinstance(source, torch.Generator):
        # One that stands for another refuses to be asked by its own methods.
        get, put = torch._C.Generator.get_state, torch._C.Generator.set_state
        return _HostGenerator("a torch.Generator", lambda: get(source), lambda s: put(source, s))
    return _HostGenerator("a random.Random", source.getstate, source.setstate)


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _comparable(part) for name, part in state.items()}
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    return state.tobytes() if isinstance(state, np.ndarray) else state


class States:
    """The states of the host's generators at one time."""

    def __init__(self, roots: list[Any]) -> None:
        generators = (*_GLOBAL, *map(_of, _sources(roots)))
        self.before = [(one, one.state()) for one in generators]

    def drawn(self) -> str | None:
        """Return the name of the first generator that was drawn from."""
        return next(
            (o.name for o, state in self.before if _comparable(o.state()) != _comparable(state)),
            None,
        )

    def renew(self) -> None:
        """Take the states of now."""
        self.before = [(one, one.state()) for one, _ in self.before]

    def now(self) -> "States":
        """Return the states of the same generators of now."""
        made = copy.copy(self)
        made.renew()
        return made

    def restore(self) -> str | None:
        """Restore each generator that was drawn from, and return the name of the first."""
        drawn = None
        for one, state in self.before:
            if _comparable(one.state()) != _comparable(state):
                one.restore(state)
                drawn = drawn or one.name
        return drawn


@contextlib.contextmanager
def at(before: "States") -> Iterator[None]:
    """Draw in the block what could be drawn at another time, and set the states of now after it."""
    now = before.now()
    before.restore()
    try:
        yield
    finally:
        now.restore()


@contextlib.contextmanager
def restored(roots: list[Any]) -> Iterator[States]:
    """Restore after the block the host's generators: global ones, and those that `roots` hold."""
    states = States(roots)
    try:
        yield states
    finally:
        states.restore()


# An argument of the functions that beartype makes around others.
_GETRANDBITS = "__beartype_getrandbits"


def _first(bits: int) -> int:
    del bits
    return 0


class _Watch:
    """A trace function of Python that finds the line of the user's code that draws first."""

    def __init__(self, states: States) -> None:
        self._states = states
        self._lines: dict[FrameType, int] = {}
        self.site: tuple[str, int] | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Follow the lines of the user's functions; the innermost is the first to notice."""
        del arg
        if _GETRANDBITS in frame.f_code.co_varnames:
            # beartype draws the item of a list that it checks. Python takes over what is set here.
            frame.f_locals[_GETRANDBITS] = _first
        if self.site is not None or _is_library(frame.f_code.co_filename):
            return None
        ran = self._lines.get(frame, frame.f_lineno)
        self._lines[frame] = frame.f_lineno
        if event in ("line", "return") and self._states.drawn() is not None:
            self.site = frame.f_code.co_filename, ran
        if event == "return":
            del self._lines[frame]
        return self

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look at each line that runs inside the block."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


@functools.cache
def _is_library(file: str) -> bool:
    is_made = file.startswith("<") and not file.startswith(("<stdin", "<ipython"))
    return is_made or is_inside(file)


_ELSEWHERE = (
    "; in code that is not yours: .eval() if it draws in training only, or `tpuport run --eager"
    " NAME`, which leaves that class to eager PyTorch"
)
_DRAWN_BEFORE = (
    "draw them with torch (torch.rand, torch.randint), by the functions of `random` and"
    " `numpy.random`, or from a generator that an attribute of the module is: a ported model makes"
    " these fresh at each call; or pass the torch.Generator as an argument" + _ELSEWHERE
)
_DRAWN_IN_PROGRAM = (
    "draw them with torch (torch.rand, torch.randint), which a ported model makes fresh at each"
    " call; also one number at a time (random.random(), np.random.uniform(a, b),"
    " random.choice(items)); or draw before the call, and pass what was drawn as an argument: only"
    " a call of the ported model itself makes other draws before it" + _ELSEWHERE
)


@dataclass(frozen=True)
class Drawn:
    """How a trace may draw from the host's generators.

    Attributes:
        plan: says whether to look for the line that draws, which takes time.
        tapes: the tape of the trace, if it has one.
        can_record: whether another attempt may have one.
    """

    plan: SpeculationLog
    tapes: Sequence[Tape]
    can_record: bool


class _BesideTapes:
    """What is drawn by calls that are not on a tape."""

    def __init__(self, states: States, tapes: Sequence[Tape]) -> None:
        self.states = states
        self.drawn: str | None = None
        for tape in tapes:
            tape.around = self._step

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        self.drawn = self.drawn or self.states.drawn()
        yield
        self.states.renew()


@contextlib.contextmanager
def unchanged(roots: list[Any], how: Drawn) -> Iterator[None]:
    """Refuse a trace, run inside the block, that draws from a generator of the host.

    The generators are restored: what runs next, another attempt or eager code, draws the numbers
    that eager code would have drawn here. What is on a tape may be drawn.

    Args:
        roots: the module and the arguments, which may refer to generators; the global generators
            are watched in any case.
        how: what the trace may draw.

    Raises:
        RestartTrace: the trace drew from one, and another attempt can tell more.
        PortError: the trace drew from one.
    """
    states, plan = States(roots), how.plan
    beside = _BesideTapes(states.now(), how.tapes)
    watch = _Watch(beside.states)
    try:
        with watch.watching() if plan.watch_draws else contextlib.nullcontext():
            yield
        drawn = beside.drawn or beside.states.drawn()
    finally:
        states.restore()
    unbalanced = [tape for tape in how.tapes if tape.is_unbalanced()]
    if unbalanced and not plan.host_state:
        # A flag among the state may decide, as that of what is filled at the first call.
        raise RestartTrace(host_state=True)
    for tape in unbalanced:
        tape.refuse_unbalanced()
    if drawn is not None and not plan.watch_draws:
        is_on_tape = not how.can_record or plan.records_draws
        raise RestartTrace(watch_draws=is_on_tape, records_draws=not is_on_tape)
    if drawn is not None and not plan.host_state:
        raise RestartTrace(host_state=True)
    if drawn is not None:
        raise port_error(
            f"the function drew random numbers from {drawn} while it was traced;"
            " they would be the same at every call",
            code="TPU404",
            remedy=_DRAWN_BEFORE if how.can_record else _DRAWN_IN_PROGRAM,
            place="{}:{}".format(*watch.site) if watch.site else None,
        )
