"""Comparison of two traces: whether they are the same program."""

import dataclasses
import functools
import re
import types
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend import core
from jax.extend.linear_util import WrappedFun

from tpuport.foundation.pytree.compare import same_value
from tpuport.tracing.scan_layers.iterations import same_kinds

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def same_program(ours: Any, theirs: Any) -> bool:
    """Return whether two `ClosedJaxpr` compute the same from the same inputs.

    Functions among an operation's parameters (derivative rules) are compared by their code and by
    what their closures hold. What cannot be compared counts as different.
    """
    if len(ours.consts) != len(theirs.consts):
        return False
    consts = zip(ours.consts, theirs.consts, strict=True)
    return _same_jaxpr(ours.jaxpr, theirs.jaxpr) and all(_same_array(a, b) for a, b in consts)


def same_text(ours: Any, theirs: Any) -> bool:
    """Return whether two `ClosedJaxpr` are written alike, with the same constants.

    Functions among an operation's parameters count as equal where they have the same name.
    """
    texts = [_ADDRESS.sub("", str(one.jaxpr)) for one in (ours, theirs)]
    if texts[0] != texts[1] or len(ours.consts) != len(theirs.consts):
        return False
    return all(map(_same_array, ours.consts, theirs.consts))


def same_structure(ours: Any, theirs: Any) -> bool:
    """Return whether two tree structures are the same, the jaxprs of derivatives in them too."""
    if not _same_param(ours.node_data(), theirs.node_data()):
        return False
    below = ours.children(), theirs.children()
    return len(below[0]) == len(below[1]) and all(map(same_structure, *below))


def _same_jaxpr(ours: Any, theirs: Any) -> bool:
    if ours is theirs:
        return True
    # Maps each of our variables to theirs.
    names: dict[Any, Any] = {}
    if not _define((*ours.constvars, *ours.invars), (*theirs.constvars, *theirs.invars), names):
        return False
    if len(ours.eqns) != len(theirs.eqns):
        return False
    for a, b in zip(ours.eqns, theirs.eqns, strict=True):
        if not same_kinds(a, b) or not _same_atoms(a.invars, b.invars, names):
            return False
        if a.params.keys() != b.params.keys():
            return False
        if not all(_same_param(value, b.params[name]) for name, value in a.params.items()):
            return False
        if not _define(a.outvars, b.outvars, names):
            return False
    return _same_atoms(ours.outvars, theirs.outvars, names)


def _define(ours: Any, theirs: Any, names: dict[Any, Any]) -> bool:
    if len(ours) != len(theirs):
        return False
    names.update(zip(ours, theirs, strict=True))
    return all(a.aval == b.aval for a, b in zip(ours, theirs, strict=True))


def _same_atoms(ours: Any, theirs: Any, names: dict[Any, Any]) -> bool:
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, core.Literal) != isinstance(b, core.Literal):
            return False
        same = _same_literal(a, b) if isinstance(a, core.Literal) else names.get(a) is b
        if not same:
            return False
    return True


def _same_literal(a: Any, b: Any) -> bool:
    return a.aval == b.aval and _same_array(a.val, b.val)


def _same_array(a: Any, b: Any) -> bool:
    if a is b:
        return True
    tracers = isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer)
    if tracers or getattr(a, "dtype", None) != getattr(b, "dtype", None):
        return False
    if jnp.issubdtype(getattr(a, "dtype", np.float32), jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    ours, theirs = np.asarray(a), np.asarray(b)
    return ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()


def _same_param(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, core.ClosedJaxpr):
        return same_program(a, b)
    if isinstance(a, core.Jaxpr):
        return _same_jaxpr(a, b)
    if isinstance(a, jax.tree_util.PyTreeDef):
        return same_structure(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same_param, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_param(v, b[k]) for k, v in a.items())
    if isinstance(a, (float, complex, np.generic, np.ndarray, jax.Array)):
        return _same_array(a, b)
    return _same_object(a, b)


def _same_object(a: Any, b: Any) -> bool:
    if isinstance(a, WrappedFun):
        # A derivative rule; its static arguments are among those of its transformations.
        return _same_param((a.f, a.transforms), (b.f, b.transforms))
    if isinstance(a, types.FunctionType):
        # Their globals are the same, as their code is one object.
        return a.__code__ is b.__code__ and all(map(_same_param, _held_by(a), _held_by(b)))
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and _same_param(a.__self__, b.__self__)
    if isinstance(a, functools.partial):
        ours, theirs = ((p.func, p.args, p.keywords) for p in (a, b))
        return _same_param(ours, theirs)
    key = getattr(a, "program_key", None)
    if key is not None:
        return _same_param(key(), b.program_key())
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        # Pallas keeps jaxprs in dataclasses, and a jaxpr is equal only to itself.
        fields = [field.name for field in dataclasses.fields(a)]
        return all(_same_param(getattr(a, name), getattr(b, name)) for name in fields)
    if isinstance(a, torch.Tensor):
        return False  # two tensors, whose values may differ
    if type(a).__eq__ is not object.__eq__:
        equal = a == b
        return isinstance(equal, bool) and equal
    return same_value(a, b)


def _held_by(function: types.FunctionType) -> list[Any]:
    """Return the values besides its code that decide what a function does."""
    cells = [_content(cell) for cell in function.__closure__ or ()]
    if (function.__module__ or "").partition(".")[0] == "jax":
        # The rest is jax's own: tables of results, the running trace.
        cells = [one for one in cells if isinstance(one, _MEANT)]
    return [cells, function.__defaults__, function.__kwdefaults__]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


_MEANT = (
    *(types.FunctionType, types.MethodType, functools.partial, WrappedFun),
    *(bool, int, float, str, tuple, frozenset, np.ndarray, core.ClosedJaxpr, core.Jaxpr),
)
