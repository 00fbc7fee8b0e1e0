"""Refusal of random numbers drawn on the host while tracing: each call would see the same ones."""

import contextlib
import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tpuport.foundation import pytree
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import TracedTensor

_NUMPY = (np.random.Generator, np.random.RandomState)


# These types hold no other objects.
_BARE = (torch.Tensor, np.ndarray, *pytree.ATOMS)
# For speed: frequent types of that kind, skipped by exact type, and containers, skipped if empty.
_PASSED = pytree.ATOMIC | {TracedTensor, torch.nn.Parameter}
_CONTAINERS = frozenset({dict, OrderedDict, list, set, tuple})


def _sources(roots: list[Any]) -> list[Any]:
    """Find the random generators of Python and numpy that modules and arguments refer to."""

    def parts(value: Any) -> list[Any]:
        if isinstance(value, _BARE):
            return []
        return [
            part
            for part in pytree.children(value).all
            if type(part) not in _PASSED and (type(part) not in _CONTAINERS or part)
        ]

    found = pytree.walk(roots, parts)
    return [value for value in found if isinstance(value, (*_NUMPY, random.Random))]


def state_of(source: Any) -> tuple[str, str]:
    """Return the kind of a Python or numpy generator, in words, and its state."""
    if isinstance(source, np.random.Generator):
        return "a numpy random Generator", repr(source.bit_generator.state)
    if isinstance(source, np.random.RandomState):
        kind, keys, position, *_ = source.get_state(legacy=True)
        return "a numpy RandomState", f"{kind}{np.asarray(keys).tobytes()!r}{position}"
    return "a random.Random", repr(source.getstate())


def _states(sources: list[Any]) -> list[tuple[str, str]]:
    numpy_state: Any = np.random.get_state()
    return [
        ("Python's `random`", repr(random.getstate())),
        ("numpy's global random state", f"{numpy_state[1].tobytes()!r}{numpy_state[2]}"),
        ("torch's CPU generator", repr(torch.get_rng_state().numpy().tobytes())),
        *map(state_of, sources),
    ]


@contextlib.contextmanager
def unchanged(roots: list[Any]) -> Iterator[None]:
    """Refuse a trace, run inside the block, that draws from a generator of the host.

    Args:
        roots: the module and the arguments, which may refer to generators; the global generators
            are watched in any case.

    Raises:
        PortError: the trace drew from one.
    """
    sources = _sources(roots)
    before = _states(sources)
    yield
    for (name, was), (_, now) in zip(before, _states(sources), strict=True):
        if was != now:
            raise port_error(
                f"the function drew random numbers from {name} while it was traced;"
                " they would be the same at every call",
                code="TPU404",
                remedy=(
                    "draw them with torch (torch.rand, torch.randint), which a ported model makes"
                    " fresh at each call"
                ),
            )
