"""Functions of numpy on numbers that depend on the program's inputs."""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core import int64, sym_numbers
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.patches.math_functions import ask_state_first


class NumpyFunctions(Shim):
    """`np.log(n)` and others of a traced number `n` give a traced number, as numpy's own do."""

    TARGET = "numpy.log"
    REASON = "numpy reads the value of a number in C, and a traced number has none yet"

    def replacements(self) -> list[Replacement]:
        made = [(kind, "__array_ufunc__", _call) for kind in sym_numbers.SYMBOLIC]
        made += [(kind, "__getattr__", _attribute) for kind in sym_numbers.SYMBOLIC]
        return [Replacement(*one) for one in made]


_FLOATS: dict[str, Callable[..., Any]] = {
    **{name: getattr(jnp, name) for name in ("sqrt", "cbrt", "exp", "exp2", "expm1", "reciprocal")},
    **{name: getattr(jnp, name) for name in ("log", "log2", "log10", "log1p", "rint", "fabs")},
    **{name: getattr(jnp, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{f"arc{name}": getattr(jnp, f"arc{name}") for name in ("sin", "cos", "tan", "tan2")},
    **{f"arc{name}": getattr(jnp, f"arc{name}") for name in ("sinh", "cosh", "tanh")},
    **{name: getattr(jnp, name) for name in ("hypot", "copysign", "logaddexp", "float_power")},
    **{name: getattr(jnp, name) for name in ("degrees", "radians", "deg2rad", "rad2deg")},
}
# These keep integers as they are.
_WHOLE = {name: getattr(jnp, name) for name in ("floor", "ceil", "trunc")}
_TRUTHS = {name: getattr(jnp, name) for name in ("isnan", "isinf", "isfinite", "signbit")}
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{"add": operator.add, "subtract": operator.sub, "multiply": operator.mul},
    **{"divide": operator.truediv, "floor_divide": operator.floordiv, "remainder": operator.mod},
    **{"power": operator.pow, "square": lambda x: x * x, "negative": operator.neg},
    **{"absolute": abs, "positive": lambda x: x},
    **{"maximum": torch.sym_max, "minimum": torch.sym_min},
    **{"less": operator.lt, "less_equal": operator.le, "equal": operator.eq},
    **{"greater": operator.gt, "greater_equal": operator.ge, "not_equal": operator.ne},
}
_SINGLE: type = np.float32
_EXACT: tuple[type, ...] = (
    *(bool, int, float, np.bool_, np.int64, _SINGLE),
    *sym_numbers.SYMBOLIC,
)


def _call(number: Any, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
    """Call a function of numpy on scalars one of which is traced, or on arrays of objects."""
    if any(isinstance(one, np.ndarray) or np.ndim(_known(one)) for one in inputs):
        return getattr(ufunc, method)(*map(_object, inputs), **options)
    name = ufunc.__name__
    if method != "__call__" or options or not all(isinstance(one, _EXACT) for one in inputs):
        raise _refusal(f"np.{name} with options, or a scalar of other bits than Python's,")
    ask_state_first()
    scalars = [_scalar(one) for one in inputs]
    single = any(isinstance(one, _SINGLE) for one in inputs)
    if name in _OPERATORS:
        made = _OPERATORS[name](*map(sym_numbers.from_node, scalars))
        return made if isinstance(made, torch.SymBool) else _result(made, single=single)
    if any(node.kind is bool for node in scalars):
        raise _refusal(f"np.{name} of a truth value, which numpy computes in 16 bits,")
    if name in _TRUTHS:
        with int64.scope():
            holds = _TRUTHS[name](scalars[0].sym_float().exact())
        return sym_numbers.number(holds, bool)
    if name == "sign":
        whole = scalars[0].kind is int
        made = torch.SymFloat(scalars[0].function(jnp.sign))
        return _result(torch.sym_int(made) if whole else made, single=single)
    if name in _WHOLE and scalars[0].kind is int:
        return _result(sym_numbers.from_node(scalars[0]), single=single)
    operation = _FLOATS.get(name) or _WHOLE.get(name)
    # The reciprocal of an integer is one too.
    if operation is None or (name == "reciprocal" and scalars[0].kind is int):
        raise _refusal(f"np.{name}")
    made = torch.SymFloat(scalars[0].function(operation, *scalars[1:]))
    return _result(made, single=single)


def _known(value: Any) -> Any:
    return 0 if isinstance(value, sym_numbers.SYMBOLIC) else value


def _object(value: Any) -> Any:
    """Return an operand of numpy's loops over objects, which call the methods of each."""
    if not isinstance(value, sym_numbers.SYMBOLIC):
        return value
    made = np.empty((), object)
    made[()] = value
    return made


def _scalar(value: Any) -> NumberNode:
    """Return the node of a number as numpy takes it: a scalar of its own."""
    if isinstance(value, sym_numbers.SYMBOLIC):
        node = value.node
        made = NumberNode(node.held, node.kind, node.low, node.high, node.expr, node.span)
    else:
        kinds = {np.bool_: bool, np.int64: int, np.float32: float, np.float64: float}
        kind = kinds.get(type(value), type(value))
        low = high = kind(value)
        if math.isnan(low):
            low, high = -math.inf, math.inf
        made = NumberNode(kind(value), kind, low, high)
    made.is_numpy = True
    return made


def _result(made: Any, *, single: bool) -> Any:
    """Return a result as the scalar that numpy makes; of float32 it is rounded."""
    if not isinstance(made, sym_numbers.SYMBOLIC):
        return made
    if single:
        with int64.scope():
            rounded = made.node.sym_float().exact().astype(jnp.float32)
        return torch.SymFloat(NumberNode(rounded, float))
    made.node.is_numpy = True
    return made


def _attribute(number: Any, name: str) -> Any:
    """Return an attribute that numpy's scalars have and Python's numbers do not."""
    node = vars(number).get("node")
    if not getattr(node, "is_numpy", False) or not hasattr(np.float64, name):
        raise AttributeError(f"{type(number).__name__!r} object has no attribute {name!r}")
    if name == "item":
        return lambda: sym_numbers.as_python(number)
    if name == "dtype":
        return np.dtype({float: np.float64, int: np.int64, bool: np.bool_}[node.kind])
    raise _refusal(f"the attribute {name!r} of a scalar of numpy")


def _refusal(what: str) -> Exception:
    return port_error(
        f"{what} is asked for, of a number that depends on the program's inputs",
        code="TPU103",
        remedy="use math, or torch operations on the tensor itself; or pass the number as an"
        " argument (it is then static)",
    )
