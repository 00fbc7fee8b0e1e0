"""Primitives of jax on numpy arrays in float64, so that a program of many kinds compiles none."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.special

Values = Sequence[np.ndarray]


def _broadcast(x: np.ndarray, p: dict[str, Any]) -> np.ndarray:
    sizes = [1] * len(p["shape"])
    for own, dim in enumerate(p["broadcast_dimensions"]):
        sizes[dim] = x.shape[own]
    return np.broadcast_to(x.reshape(sizes), p["shape"])


def _dot(a: np.ndarray, b: np.ndarray, p: dict[str, Any]) -> np.ndarray:
    (left, right), (left_batch, right_batch) = p["dimension_numbers"]
    left_free = [d for d in range(a.ndim) if d not in (*left, *left_batch)]
    right_free = [d for d in range(b.ndim) if d not in (*right, *right_batch)]
    batch = [a.shape[d] for d in left_batch]
    rows, columns = [a.shape[d] for d in left_free], [b.shape[d] for d in right_free]
    inner = int(np.prod([a.shape[d] for d in left]))
    mine = a.transpose(*left_batch, *left_free, *left)
    mine = mine.reshape(*batch, int(np.prod(rows)), inner)
    other = b.transpose(*right_batch, *right, *right_free)
    other = other.reshape(*batch, inner, int(np.prod(columns)))
    return (mine @ other).reshape(*batch, *rows, *columns)


def _iota(p: dict[str, Any]) -> np.ndarray:
    sizes = [1] * len(p["shape"])
    sizes[p["dimension"]] = p["shape"][p["dimension"]]
    line = np.arange(sizes[p["dimension"]], dtype=p["dtype"]).reshape(sizes)
    return np.broadcast_to(line, p["shape"])


def _slice(x: np.ndarray, p: dict[str, Any]) -> np.ndarray:
    steps = p["strides"] or [1] * x.ndim
    return x[tuple(map(slice, p["start_indices"], p["limit_indices"], steps))]


def _select(values: Values) -> np.ndarray | None:
    which, *cases = values
    return np.where(which, cases[1], cases[0]) if len(cases) == 2 and which.dtype == bool else None


_ONE: dict[str, Callable[[np.ndarray], Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "tanh": np.tanh,
    "logistic": scipy.special.expit,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "neg": np.negative,
    "sign": np.sign,
    "square": np.square,
    "floor": np.floor,
    "ceil": np.ceil,
    "is_finite": np.isfinite,
    "erf": scipy.special.erf,
    "erfc": scipy.special.erfc,
    "erf_inv": scipy.special.erfinv,
    "copy": lambda x: x,
}
_TWO: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
_FLOATING_ONLY = {"div", "pow", "neg", "sign", "integer_pow"}
_BY_PARAMS: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot,
    "iota": _iota,
    "slice": _slice,
    "reshape": lambda x, p: x.reshape(p["new_sizes"]),
    "transpose": lambda x, p: x.transpose(p["permutation"]),
    "squeeze": lambda x, p: np.squeeze(x, tuple(p["dimensions"])),
    "convert_element_type": lambda x, p: x.astype(p["new_dtype"]),
    "concatenate": lambda *xs: np.concatenate(xs[:-1], xs[-1]["dimension"]),
    "integer_pow": lambda x, p: np.power(x, float(p["y"])),
    "reduce_sum": lambda x, p: x.sum(tuple(p["axes"]), dtype=x.dtype),
    "reduce_max": lambda x, p: x.max(tuple(p["axes"])),
    "reduce_min": lambda x, p: x.min(tuple(p["axes"])),
}


def evaluate(name: str, values: Sequence[Any], params: dict[str, Any]) -> np.ndarray | None:
    """Return the result of a primitive; None if it is not among these.

    Args:
        name: The primitive.
        values: Its operands.
        params: Its parameters, with wide dtypes.
    """
    if name not in _ONE and name not in _TWO and name not in _BY_PARAMS and name != "select_n":
        return None
    arrays = [np.asarray(value) for value in values]
    if any(one.dtype.kind not in "fbiu" for one in arrays):
        return None
    if name in _FLOATING_ONLY and arrays[0].dtype.kind != "f":
        return None
    with np.errstate(all="ignore"):
        if name == "select_n":
            return _select(arrays)
        if name in _ONE:
            return np.asarray(_ONE[name](arrays[0]))
        if name in _TWO:
            return np.asarray(_TWO[name](*arrays))
        return np.asarray(_BY_PARAMS[name](*arrays, params))
