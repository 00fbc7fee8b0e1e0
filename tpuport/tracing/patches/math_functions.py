"""Functions of Python's `math` on numbers that depend on the program's inputs."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.scipy import special

from tpuport.foundation.patching.shim import Replacement, Shim, everywhere, original_of
from tpuport.tracing.core import int64, sym_numbers
from tpuport.tracing.core.context import current
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.core.sym_node import NumberNode, raise_in_64
from tpuport.tracing.core.tensor import TracedTensor, item


def _gamma(x: jax.Array) -> jax.Array:
    # jax's gammasgn selects by an argmax, which does not lower in 64 bits.
    whole = jnp.floor(x)
    sign = jnp.where((x > 0) | (whole % 2 == 0), 1.0, -1.0)
    return jnp.where((x <= 0) & (x == whole), math.nan, sign * jnp.exp(special.gammaln(x)))


def _log(x: jax.Array, base: jax.Array | None = None) -> jax.Array:
    return jnp.log(x) if base is None else jnp.log(x) / jnp.log(base)


_FLOATS: dict[str, Callable[..., jax.Array]] = {
    **{name: getattr(jnp, name) for name in ("sqrt", "exp", "log2", "log10", "log1p", "expm1")},
    **{name: getattr(jnp, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{f"a{name}": getattr(jnp, f"arc{name}") for name in ("sin", "cos", "tan")},
    **{f"a{name}": getattr(jnp, f"arc{name}") for name in ("sinh", "cosh", "tanh", "tan2")},
    **{name: getattr(jnp, name) for name in ("hypot", "copysign", "fmod", "degrees", "radians")},
    **{"fabs": jnp.abs, "pow": jnp.power, "log": _log, "gamma": _gamma, "exp2": jnp.exp2},
    **{"cbrt": jnp.cbrt, "lgamma": special.gammaln, "erf": special.erf, "erfc": special.erfc},
}
_TRUTHS = {name: getattr(jnp, name) for name in ("isnan", "isinf", "isfinite")}


class MathFunctions(Shim):
    """`math.sqrt` and the others give a traced number of a traced one."""

    TARGET = "math.sqrt"
    REASON = "they read the value of a number in C, and a traced number has none yet"

    def replacements(self) -> list[Replacement]:
        floats = ((n, functools.partial(_traced, f)) for n, f in _FLOATS.items())
        truths = ((n, functools.partial(_truth, f)) for n, f in _TRUTHS.items())
        named = [*floats, *truths, ("isclose", _isclose)]
        return everywhere([(math, name, make) for name, make in named])

    def copied(self) -> list[Any]:
        return [original_of(math, name) for name in (*_FLOATS, *_TRUTHS, "isclose")]


def _node(value: Any) -> Any:
    """Return the node of a number, None for what is no traced number."""
    if isinstance(value, TracedTensor):
        value = item(value)
    if isinstance(value, sym_numbers.SYMBOLIC):
        return value.node
    return None


def _nodes(args: tuple[Any, ...]) -> list[NumberNode] | None:
    """Return the nodes of numbers, None if no one is traced."""
    if current() is None:
        return None
    found = [_node(arg) for arg in args]
    if not any(isinstance(node, NumberNode) for node in found):
        return None
    plain = [
        NumberNode(float(a), float) if n is None else n for a, n in zip(args, found, strict=True)
    ]
    return plain


def _traced(operation: Callable[..., jax.Array], original: Any) -> Callable[..., Any]:
    def function(*args: Any) -> Any:
        nodes = _nodes(args)
        if nodes is None:
            return original(*args)
        ask_state_first()
        result = nodes[0].function(operation, *nodes[1:])
        with int64.scope():
            _check(result.exact(), [node.sym_float().exact() for node in nodes])
        return torch.SymFloat(result)

    return function


def ask_state_first() -> None:
    """Trace again with small state kept concrete, where the number may be a sampler's constant.

    A training step changes its state, and would be compiled again for each of its values.
    """
    trace = current()
    if trace is None or trace.explorer is None or torch.is_grad_enabled():
        return
    if not trace.explorer.plan.host_state:
        raise RestartTrace(host_state=True)


def _check(result: jax.Array, given: list[jax.Array]) -> None:
    """Raise what Python raises where there is no result, or none that a float can hold."""
    finite = jnp.all(jnp.stack([jnp.isfinite(one) for one in given]))
    known = jnp.logical_not(jnp.any(jnp.stack([jnp.isnan(one) for one in given])))
    raise_in_64(lambda: known & jnp.isnan(result), ValueError("math domain error"))
    # Where a logarithm or a power of zero has a pole Python calls that the domain too.
    at_zero = given[0] == 0
    raise_in_64(lambda: finite & jnp.isinf(result) & at_zero, ValueError("math domain error"))
    raise_in_64(lambda: finite & jnp.isinf(result) & ~at_zero, OverflowError("math range error"))


def _truth(operation: Callable[[jax.Array], jax.Array], original: Any) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        nodes = _nodes((x,))
        if nodes is None:
            return original(x)
        with int64.scope():
            holds = operation(nodes[0].exact())
        return sym_numbers.number(holds, bool)

    return function


def _isclose(original: Callable[..., bool]) -> Callable[..., Any]:
    def isclose(a: Any, b: Any, *, rel_tol: float = 1e-09, abs_tol: float = 0.0) -> Any:
        nodes = _nodes((a, b, rel_tol, abs_tol))
        if nodes is None:
            return original(a, b, rel_tol=rel_tol, abs_tol=abs_tol)
        with int64.scope():
            x, y, relative, absolute = (node.sym_float().exact() for node in nodes)
            bound = jnp.maximum(relative * jnp.maximum(jnp.abs(x), jnp.abs(y)), absolute)
            near = jnp.isfinite(x) & jnp.isfinite(y) & (jnp.abs(x - y) <= bound)
            holds = (x == y) | near
        return sym_numbers.number(holds, bool)

    return isclose
