"""The quick way of a call: a program that is found by the kinds of a call's plain arguments.

The general way takes arguments of any structure apart and describes them, which takes ten times as
long as jax's own dispatch. Most calls have a few tensors, arrays and Python values.
"""

import operator
from typing import TYPE_CHECKING, Any

import jax
import torch
from jax._src.array import ArrayImpl

from tpuport.foundation import pytree
from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import backend
from tpuport.model.program_cache import CachedProgram, modes, raise_failed
from tpuport.model.shared_results import share
from tpuport.tracing.core import arguments
from tpuport.tracing.core.keys import fresh_key, unused_key
from tpuport.tracing.core.storage import Storage
from tpuport.tracing.core.tensor import TracedTensor, flow_seen

if TYPE_CHECKING:
    from tpuport.model.ported_state import PortedState

# One program may be bound for each of many strings.
_MOST_BOUND = 1024
# Values that are part of a program, and are equal only if they are the same for Python's code.
_STATIC = frozenset({bool, int, str, type(None)})
# Dtypes that numpy holds as jax does.
_SAME_IN_NUMPY = frozenset(
    {torch.float32, torch.float16, torch.bool, torch.int32, torch.int16, torch.int8, torch.uint8}
)


def kinds_of(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what of a call decides about its program; None if the arguments are not plain ones."""
    kinds: list[Any] = [method, modes()]
    tensors = 0
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is torch.Tensor:
            if value.layout is not torch.strided or value.device.type != "cpu" or value.__dict__:
                return None
            graph = (value.requires_grad, value.is_leaf)
            kinds.append((value.dtype, value.shape, value.stride(), graph))
            tensors += 1
        elif kind is ArrayImpl:
            kinds.append((value.shape, value.dtype))
            tensors += 1
        elif kind in _STATIC:
            kinds.append((kind, value))
        else:
            return None
    if tensors > 1 and _are_shared((*args, *kwargs.values())):
        return None
    return (*kinds, *kwargs) if kwargs else tuple(kinds)


def _are_shared(values: tuple[Any, ...]) -> bool:
    """Return whether a tensor occurs twice: a structure that differs from two tensors."""
    found = [id(v) for v in values if type(v) is torch.Tensor or type(v) is ArrayImpl]
    return len(set(found)) < len(found)


class BoundProgram:
    """A program with the names of its state, ready for calls of one kind.

    Args:
        compiled: a program that `suits`.
    """

    def __init__(self, compiled: CachedProgram) -> None:
        self._compiled, self._outcome = compiled, compiled.outcome
        names = compiled.names
        # With two names or more, it returns a tuple.
        self._state = operator.itemgetter(*names, names[0]) if names else None
        self._baked = compiled.baked
        self._checks = compiled.outcome.trace.recorder.checks
        self._shares = bool(compiled.outcome.out_aliases)
        self._metas = [
            arguments.result_meta(meta) if isinstance(meta, torch.Tensor) else meta
            for meta in compiled.outcome.out_metas
        ]

    def call(
        self, ported: "PortedState", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Return whether the program can be used still, and its output."""
        state = {**ported.buffers, **ported.params}
        outcome, compiled = self._outcome, self._compiled
        if outcome.trace.recorder.guards.changed() is not None:
            return False, None
        try:
            picked = () if self._state is None else self._state(state)[:-1]
        except KeyError:
            return False, None
        if self._baked and not all(state[n] is v for n, v in self._baked.items()):
            return False, None
        values = [
            value if type(value) is ArrayImpl else _array(value)
            for value in (*args, *kwargs.values())
            if type(value) not in _STATIC
        ]
        key = ported._last_key = fresh_key() if outcome.uses_key else unused_key()
        outs, new_state, _, _, code = compiled.run(picked, key, values)
        raise_failed(self._checks, code)
        if new_state:
            ported._advance(compiled, new_state)
        made = list(map(_result, outs, self._metas))
        if self._shares:
            leaves = [v for v in (*args, *kwargs.values()) if type(v) not in _STATIC]
            share(ported, compiled, leaves, made)
        return True, pytree.unflatten(outcome.out_spec, made)


def bind(
    ported: "PortedState",
    compiled: CachedProgram | None,
    bound: dict[Any, BoundProgram],
    key: Any,
) -> None:
    """Keep a program for the calls of a key, if it can run without the rest of a call."""
    if compiled is None or not _suits(ported, compiled):
        return
    if len(bound) >= _MOST_BOUND:
        bound.clear()
    bound[key] = BoundProgram(compiled)


def _suits(ported: "PortedState", compiled: CachedProgram) -> bool:
    """Return whether a program changes nothing but state, and reads no argument's value."""
    outcome = compiled.outcome
    changes = outcome.argument_changes is not None or outcome.python_changes is not None
    return not (
        changes or outcome.host_paths or outcome.placed or compiled.writes or ported._is_placed
    )


def _result(value: Any, meta: Any) -> Any:
    if isinstance(meta, torch.Tensor):
        flow = flow_seen(meta.requires_grad)
        return TracedTensor(Storage(value, None), (), meta, value, flow)
    return arguments.from_program(value, meta)


def _array(tensor: torch.Tensor) -> Any:
    """Return a copy of a tensor, which jax's dispatch takes to the device itself."""
    if tensor.dtype in _SAME_IN_NUMPY:
        return tensor.detach().resolve_conj().resolve_neg().numpy().copy()
    try:
        with jax.ensure_compile_time_eval():
            return backend.to_jax(tensor)
    except OverflowError as error:
        msg = f"an argument of shape {tuple(tensor.shape)}: {error}"
        raise UsageError(msg) from error
