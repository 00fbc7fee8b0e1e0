"""Runs of the demo's models on plain torchax: the exception, or the different result."""

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

from tpuport.foundation.interop import backend

_PACKAGES = ("torch", "torchax", "jax", "jaxlib")


@dataclass(frozen=True)
class TorchaxFailure:
    """An exception of plain torchax, and the line of the model that raised it."""

    error: str
    place: str
    source: str


@dataclass(frozen=True)
class Difference:
    """A result of eager PyTorch and of plain torchax; the two may differ without an error."""

    what: str
    eager: str
    plain: str


class _Call(torch.nn.Module):
    """A function of a model as a module, because `extract_jax` takes only modules."""

    def __init__(self, model: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *args: Any) -> Any:
        return self.function(self.model, *args)


def run_plain(
    model: torch.nn.Module, function: Callable[..., Any], *args: Any, times: int = 1
) -> list[Any]:
    """Run `function(model, *args)` under `torchax.extract_jax` and `jax.jit`, on a copy.

    Args:
        model: Any module; it is not changed.
        function: The function to run.
        *args: Pytrees of CPU tensors.
        times: Number of calls of the jitted function.

    Returns:
        One result per call, with tensors on the CPU.
    """
    import torchax  # `interop.backend` has imported it, and undid what the import changes

    with _environment() as env:
        states, pure = torchax.extract_jax(_Call(copy.deepcopy(model), function))
        jitted = jax.jit(pure)
        values = env.t2j_copy(args)
        results = [jitted(states, values) for _ in range(times)]
        return [jax.tree.map(backend.to_torch, result) for result in results]


def failure_of(
    model: torch.nn.Module, call: Callable[[Any, Any], Any], inputs: Any
) -> TorchaxFailure | None:
    """Return how plain torchax fails on a call of the model; None if it runs."""

    def as_dict(model: torch.nn.Module, inputs: Any) -> Any:
        # jax.jit refuses outputs of classes like ModelOutput, so the result becomes a dict inside.
        return dict(call(model, inputs))

    try:
        run_plain(model, as_dict, inputs)
    except Exception as error:
        return _described(error)
    return None


def _described(error: Exception) -> TorchaxFailure:
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_model_code(f.filename)]
    place, source = (
        (f"{Path(frames[-1].filename).name}:{frames[-1].lineno}", frames[-1].line or "")
        if frames
        else ("", "")
    )
    return TorchaxFailure(f"{type(error).__name__}: {first}", place, source)


def _is_model_code(file: str) -> bool:
    parts = Path(file).parts
    return not any(name in parts for name in _PACKAGES) and file != __file__


@contextmanager
def _environment() -> Iterator[Any]:
    """Yield torchax's environment; restore its key, in which a jitted random op leaves a tracer."""
    import torchax

    env = torchax.default_env()
    key = env.prng_key
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield env
    finally:
        env.prng_key = key
