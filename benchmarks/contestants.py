"""One model in each of the ways to run it: ported, plain torchax, hand-written JAX, PyTorch."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.models import Case

OURS, PLAIN, HAND = "tpuport", "plain torchax", "hand-written JAX"
EAGER, COMPILED = "eager PyTorch", "torch.compile"
FORWARD, TRAINING = "forward", "value_and_grad"


@dataclass(frozen=True)
class Pure:
    """A pure function `call(params, rest, args)` that returns one array, with its arguments."""

    call: Callable[[Any, Any, Any], Any]
    params: Any
    rest: Any
    args: Any

    def make(self, what: str) -> Callable[..., Any]:
        """Return a function that jax has not seen: the forward, or the loss with gradients."""
        import jax
        import jax.numpy as jnp

        call = self.call
        if what == FORWARD:
            return lambda params, rest, args: call(params, rest, args)
        return jax.value_and_grad(lambda p, rest, args: jnp.square(call(p, rest, args)).mean())

    @property
    def inputs(self) -> tuple[Any, Any, Any]:
        """Return the arguments of the function."""
        return self.params, self.rest, self.args


def make_pure(case: Case) -> dict[str, Pure]:
    """Return the JAX functions of a case by contestant."""
    import jax.numpy as jnp

    args = tuple(jnp.asarray(value.numpy()) for value in case.args)
    found = {OURS: _ported(case, args), PLAIN: make_plain(case, args)}
    if case.hand is not None:
        params, function = case.hand()
        found[HAND] = Pure(lambda params, _, args: function(params, *args), params, (), args)
    return found


def _ported(case: Case, args: Any) -> Pure:
    import tpuport

    ported = tpuport.convert(case.module, verify=False)

    def call(params: Any, buffers: Any, args: Any) -> Any:
        return ported.apply(params, buffers, None, *args)[0]

    return Pure(call, ported.params, ported.buffers, args)


def make_plain(case: Case, args: Any) -> Pure:
    """Return a case under plain torchax, for arguments as jax arrays."""
    import torchax  # imported by tpuport before, which undoes its global changes

    states, function = torchax.extract_jax(case.module)
    trained = {name for name, value in case.module.named_parameters() if value.requires_grad}
    params = {name: value for name, value in states.items() if name in trained}
    rest = {name: value for name, value in states.items() if name not in trained}
    return Pure(lambda params, rest, args: function({**params, **rest}, args), params, rest, args)


def make_eager(case: Case, what: str) -> Callable[[], object]:
    """Return a call of the model in eager PyTorch."""
    return _torch_call(case.module, case, what)


class NoCompilerError(Exception):
    """torch.compile cannot run a model here. The message has the reason."""


def check_compiler() -> None:
    """Raise `NoCompilerError` if there is no C++ compiler, which torch.compile needs."""
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    if not any(name and shutil.which(name) for name in names):
        raise NoCompilerError("there is no C++ compiler (g++ or clang++) on this machine")


def make_compiled(case: Case, what: str) -> Callable[[], object]:
    """Return a call of the model under torch.compile, compiled and warm.

    Dynamo refuses to compile once plain torchax is imported ("PyTorch is not linked with support
    for jax devices", torch 2.13 with torchax 0.0.14), so this has to come first in a process.

    Raises:
        NoCompilerError: There is no C++ compiler, or torch.compile cannot compile the model.
    """
    check_compiler()
    # fullgraph, so that it cannot silently fall back to eager. dynamic=False, since torch.compile
    # would make symbols of sizes that differ between models of one class.
    compiled = torch.compile(case.module, fullgraph=True, dynamic=False)
    call = _torch_call(compiled, case, what)
    try:
        for _ in range(3):
            call()
    except RuntimeError as error:  # the base class of dynamo's and inductor's errors
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise NoCompilerError(reason) from error
    return call


def _torch_call(module: Callable[..., Any], case: Case, what: str) -> Callable[[], object]:
    if what == FORWARD:

        def forward() -> object:
            with torch.no_grad():
                return module(*case.args)

        return forward

    def training() -> object:
        for parameter in case.module.parameters():
            parameter.grad = None
        loss = module(*case.args).square().mean()
        loss.backward()
        return loss

    return training
