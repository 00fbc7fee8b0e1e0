"""The share of its grid that a splash kernel computes, if its mask is a constant of the jaxpr.

Splash's second operand, `block_mask` of its `MaskInfo`, classifies each step: 0 for one to skip, 1
for a block to mask, 2 for a block that is seen completely. Source:
jax/experimental/pallas/ops/tpu/splash_attention/splash_attention_mask_info.py.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend import core

from tpuport.cost.walking import PALLAS, inner_jaxprs, open_jaxpr
from tpuport.foundation.interop.scan_params import scan_counts

# Primitives that pass an array on with its values unchanged.
_SAME = ("convert_element_type", "copy", "copy_p", "device_put", "sharding_constraint")
_BLOCK_MASK = 1

_Known = dict[Any, np.ndarray]


def active_shares(jaxpr: Any) -> dict[int, float]:
    """Return the share of steps that are not skipped, by `id` of the `pallas_call` equation.

    Left out are kernels other than splash's, those whose mask is computed at run time, and those
    called with several masks.
    """
    found: dict[int, set[float | None]] = {}
    for eqn, share in _walk(jaxpr, {}):
        found.setdefault(id(eqn), set()).add(share)
    single = {key: next(iter(shares)) for key, shares in found.items() if len(shares) == 1}
    return {key: share for key, share in single.items() if share is not None}


def _constants(jaxpr: Any) -> _Known:
    if not isinstance(jaxpr, core.ClosedJaxpr):
        return {}
    pairs = zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
    return {
        var: np.asarray(value)
        for var, value in pairs
        if hasattr(value, "nbytes") and value.dtype.kind in "iu"
    }


def _walk(jaxpr: Any, known: _Known) -> Iterator[tuple[Any, float | None]]:
    """Yield each splash call with its share, None where that is not known."""
    known = {**known, **_constants(jaxpr)}
    for eqn in open_jaxpr(jaxpr).eqns:
        name = eqn.primitive.name
        if name == PALLAS:
            if str(eqn.params["name"]).startswith("splash_"):
                yield eqn, _share(_value(eqn.invars[_BLOCK_MASK], known))
            continue
        if name in _SAME and (value := _value(eqn.invars[0], known)) is not None:
            known[eqn.outvars[0]] = value
        for inner in inner_jaxprs(eqn):
            yield from _walk(inner, _passed(eqn, open_jaxpr(inner), known))


def _passed(eqn: Any, inner: Any, known: _Known) -> _Known:
    """Return the known values of the inputs of a jaxpr within an equation."""
    operands = list(eqn.invars)
    if eqn.primitive.name == "cond":
        operands = operands[1:]
    elif eqn.primitive.name == "scan":
        operands = operands[: scan_counts(eqn.params)[0]]
    if eqn.primitive.name == "while" or len(operands) > len(inner.invars):
        return {}
    passed = {}
    for var, operand in zip(inner.invars, operands, strict=False):
        value = _value(operand, known)
        # Within `shard_map` an array may be one shard of the value outside.
        if value is not None and value.shape == var.aval.shape:
            passed[var] = value
    return passed


def _value(var: Any, known: _Known) -> np.ndarray | None:
    if isinstance(var, core.Literal):
        return np.asarray(var.val) if getattr(var.val, "shape", ()) else None
    return known.get(var)


def _share(block_mask: np.ndarray | None) -> float | None:
    return None if block_mask is None else float((block_mask > 0).mean())
