"""Plain torchax on the demo's models, run live: its exception, or what it computes instead."""

import copy
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch

from tpuport.model import backend

_PACKAGES = ("torch", "torchax", "jax", "jaxlib")


@dataclass(frozen=True)
class Failure:
    """An exception of plain torchax, and the line of the model that it came from."""

    error: str
    place: str
    source: str


@dataclass(frozen=True)
class Difference:
    """What eager PyTorch and plain torchax make of the same thing; no error tells them apart."""

    what: str
    eager: str
    plain: str


class _Call(torch.nn.Module):
    """A function of a model as a module, which is what torchax takes."""

    def __init__(self, model: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *args: Any) -> Any:
        return self.function(self.model, *args)


def run_plain(
    model: torch.nn.Module, function: Callable[..., Any], *args: Any, times: int = 1
) -> list[Any]:
    """Results of `function(model, *args)` under `torchax.extract_jax` and `jax.jit`, on a copy.

    Args:
        model: Any module; it is left alone.
        function: What to run.
        *args: Structures of CPU tensors.
        times: How often to call the jitted function.

    Returns:
        One result a call, tensors on the CPU.
    """
    import torchax  # by tpuport.model.backend already, which puts back what the import changes

    with _environment() as env:
        states, pure = torchax.extract_jax(_Call(copy.deepcopy(model), function))
        jitted = jax.jit(pure)
        values = env.t2j_copy(args)
        results = [jitted(states, values) for _ in range(times)]
        return [jax.tree.map(backend.to_torch, result) for result in results]


def failure_of(
    model: torch.nn.Module, call: Callable[[Any, Any], Any], inputs: Any
) -> Failure | None:
    """How plain torchax fails on a call of the model; None if it runs."""

    def as_dict(model: torch.nn.Module, inputs: Any) -> Any:
        # jax.jit refuses classes like ModelOutput, so what the call returns is unpacked inside.
        return dict(call(model, inputs))

    try:
        run_plain(model, as_dict, inputs)
    except Exception as error:
        return _described(error)
    return None


def _described(error: Exception) -> Failure:
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_model_code(f.filename)]
    place, source = (
        (f"{Path(frames[-1].filename).name}:{frames[-1].lineno}", frames[-1].line or "")
        if frames
        else ("", "")
    )
    return Failure(f"{type(error).__name__}: {first}", place, source)


def _is_model_code(file: str) -> bool:
    parts = Path(file).parts
    return not any(name in parts for name in _PACKAGES) and file != __file__


@contextmanager
def _environment() -> Iterator[Any]:
    """torchax's environment, given back without the tracer that a jitted random op leaves in it."""
    import torchax

    env = torchax.default_env()
    key = env.prng_key
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield env
    finally:
        env.prng_key = key
