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
from tpuport.tracing.state.tensor_attributes import OWN

if TYPE_CHECKING:
    from tpuport.model.ported_state import PortedState

# One program may be bound for each of many strings.
_MOST_BOUND = 1024
# Values that are part of a program, and are equal only if they are the same for Python's code.
_STATIC = frozenset({bool, int, str, type(None)})
# Containers of exactly these classes, whose structure is their class, keys and size.
_CONTAINERS = frozenset({tuple, list, dict})
# Dtypes that numpy holds as jax does.
_SAME_IN_NUMPY = frozenset(
    {torch.float32, torch.float16, torch.bool, torch.int32, torch.int16, torch.int8, torch.uint8}
)


def kinds_of(
    method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[torch.Tensor | jax.Array]]:
    """Return what of a call decides about its program, and the tensors and arrays in it.

    The first is None if the arguments are not plain ones.
    """
    kinds: list[Any] = [method, modes()]
    leaves: list[torch.Tensor | jax.Array] = []
    seen: set[int] = set()
    for value in (*args, *kwargs.values()) if kwargs else args:
        if not _note(value, kinds, leaves, seen):
            return None, leaves
    return ((*kinds, *kwargs) if kwargs else tuple(kinds)), leaves


def _note(value: Any, kinds: list[Any], leaves: list[Any], seen: set[int]) -> bool:
    """Add the kind of a value and its tensors; return whether it is a plain one.

    A tensor or container that occurs twice is not plain: the same one given twice needs another
    program than two that are equal.
    """
    kind = type(value)
    if kind in _STATIC:
        kinds.append((kind, value))
        return True
    if kind is float:
        kinds.append((kind, repr(value)))  # 0.0 == -0.0
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    if kind in _CONTAINERS:
        return _note_parts(value, kinds, leaves, seen)
    if kind is ArrayImpl:
        kinds.append((value.shape, value.dtype))
    elif (kind is torch.Tensor and _is_plain(value)) or (
        kind is TracedTensor and value._storage.trace is None and value.__dict__.keys() <= OWN
    ):
        graph = (value.requires_grad, value.is_leaf)
        kinds.append((kind, value.dtype, value.shape, value.stride(), graph))
    else:
        return False
    leaves.append(value)
    return True


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.__dict__


def _note_parts(value: Any, kinds: list[Any], leaves: list[Any], seen: set[int]) -> bool:
    """Add the kinds of what is in a list, tuple or dict, as `_note` does."""
    kind = type(value)
    keys: Any = tuple(value) if kind is dict else len(value)
    if kind is dict and any(type(key) is not str for key in keys):
        return False
    kinds.append((kind, keys))
    parts = value.values() if kind is dict else value
    return all(_note(part, kinds, leaves, seen) for part in parts)


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

    def call(self, ported: "PortedState", leaves: list[Any]) -> tuple[bool, Any]:
        """Return whether the program can be used still, and its output.

        Args:
            ported: the model.
            leaves: the tensors and arrays among the arguments.
        """
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
        values = [leaf if type(leaf) is ArrayImpl else _array(leaf) for leaf in leaves]
        key = ported._last_key = fresh_key() if outcome.uses_key else unused_key()
        outs, new_state, _, _, code = compiled.run(picked, key, values)
        raise_failed(self._checks, code)
        if new_state:
            ported._advance(compiled, new_state)
        made = list(map(_result, outs, self._metas))
        if self._shares:
            share(ported, compiled, leaves, made)
        return True, pytree.unflatten(outcome.out_spec, made)


def call_part(ported: Any, method: str, args: tuple[Any, ...]) -> Any:
    """Run a method that is a part of another one, by its bound program if there is one."""
    if ported._edits is not None or ported._mode is not None:
        ported._take_edits()
    kinds, leaves = kinds_of(method, args, {})
    key = (kinds, ported._state_version)
    bound = None if ported._verifying else ported._bound.get(key)
    if bound is not None:
        is_valid, out = bound.call(ported, leaves)
        if is_valid:
            return out
    out, _ = ported._run(method, args, {})
    if kinds is not None and key[1] == ported._state_version:
        bind(ported, ported._last_program, ported._bound, key)
    return out


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
        compiled.tape
        or changes
        or outcome.host_paths
        or outcome.placed
        or compiled.writes
        or ported._is_placed
    )


def _result(value: Any, meta: Any) -> Any:
    if isinstance(meta, torch.Tensor):
        flow = flow_seen(meta.requires_grad)
        return TracedTensor(Storage(value, None), (), meta, value, flow)
    return arguments.from_program(value, meta)


def _array(tensor: torch.Tensor) -> Any:
    """Return a copy of a tensor, which jax's dispatch takes to the device itself."""
    if type(tensor) is TracedTensor:
        return tensor.jax()
    if tensor.dtype in _SAME_IN_NUMPY:
        return backend.to_numpy_array(tensor).copy()
    try:
        return backend.to_host_array(tensor)
    except OverflowError as error:
        msg = f"an argument of shape {tuple(tensor.shape)}: {error}"
        raise UsageError(msg) from error
