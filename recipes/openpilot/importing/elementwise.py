"""Operators that compute each element by itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from recipes.openpilot.importing.nodes import DTYPES, Built, Constant, Node, builds, lifted, lifts

_UNARY: dict[str, Callable[..., Any]] = {
    **{"Abs": torch.abs, "Neg": torch.neg, "Exp": torch.exp, "Log": torch.log},
    **{"Sqrt": torch.sqrt, "Reciprocal": torch.reciprocal, "Floor": torch.floor},
    # ONNX and torch both round halves to even.
    **{"Ceil": torch.ceil, "Round": torch.round, "Sign": torch.sign, "Erf": torch.erf},
    **{"Sin": torch.sin, "Cos": torch.cos, "Tan": torch.tan, "Atan": torch.atan},
    **{"Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Relu": torch.relu},
    **{"Softplus": F.softplus, "Softsign": F.softsign, "Mish": F.mish, "Not": torch.logical_not},
    **{"HardSwish": F.hardswish, "IsNaN": torch.isnan},
}


@builds(*_UNARY)
def unary(node: Node) -> Built:
    """Build operators of one input without attributes."""
    return Built(_UNARY[node.op], [node.variable(0).name])


@builds("Identity", "Dropout")
def identity(node: Node) -> Built:
    """Return the input; Dropout is inactive outside of training."""
    if node.num_outputs > 1:
        raise node.refuse("the mask of a Dropout is used")
    if node.op == "Dropout" and len(node.inputs) > 2 and node.inputs[2] is not None:
        if bool(node.constant(2)):
            raise node.refuse("training_mode is on")
    return Built(_same, [node.variable(0).name])


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _hard_sigmoid(x: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    return (alpha * x + beta).clamp(0.0, 1.0)


def _thresholded(x: torch.Tensor, alpha: float) -> torch.Tensor:
    return torch.where(x > alpha, x, torch.zeros_like(x))


# The torch function, and its arguments from ONNX's attributes and defaults.
_WITH_NUMBERS: dict[str, tuple[Callable[..., Any], dict[str, tuple[str, float]]]] = {
    "Elu": (F.elu, {"alpha": ("alpha", 1.0)}),
    "Celu": (F.celu, {"alpha": ("alpha", 1.0)}),
    "LeakyRelu": (F.leaky_relu, {"negative_slope": ("alpha", 0.01)}),
    "HardSigmoid": (_hard_sigmoid, {"alpha": ("alpha", 0.2), "beta": ("beta", 0.5)}),
    "ThresholdedRelu": (_thresholded, {"alpha": ("alpha", 1.0)}),
}


@builds(*_WITH_NUMBERS)
def with_numbers(node: Node) -> Built:
    """Build activations with numeric attributes."""
    function, names = _WITH_NUMBERS[node.op]
    numbers = {ours: node.attr(onnx, default) for ours, (onnx, default) in names.items()}
    return Built(partial(function, **numbers), [node.variable(0).name])


@builds("Selu")
def selu(node: Node) -> Built:
    """Build Selu, whose numbers torch fixes to those of the paper."""
    alpha, gamma = node.attr("alpha", 1.67326319), node.attr("gamma", 1.05070102)
    if abs(alpha - 1.67326319) > 1e-6 or abs(gamma - 1.05070102) > 1e-6:
        raise node.refuse(f"alpha={alpha}, gamma={gamma} are not those of the paper")
    return Built(F.selu, [node.variable(0).name])


@builds("Gelu")
def gelu(node: Node) -> Built:
    """Build Gelu, exact or by tanh."""
    way = node.attr("approximate", "none")
    return Built(partial(F.gelu, approximate=way), [node.variable(0).name])


@builds("Cast", "CastLike")
def cast(node: Node) -> Built:
    """Build a cast to another dtype. All floats become float32."""
    if node.op == "CastLike":
        like = node.value(1)
        if isinstance(like, Constant):
            raise node.refuse("its type is that of a constant")
        return Built(partial(_to, dtype=like.dtype), [node.variable(0).name])
    kind = node.attr("to")
    if kind not in DTYPES:
        raise node.refuse(f"to={kind} is no type that is known")
    return Built(partial(_to, dtype=DTYPES[kind]), [node.variable(0).name])


def _to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


# -- several inputs --------------------------------------------------------------------------------


def _divide(x: Any, y: Any) -> Any:
    return torch.div(x, y)


def _divide_integers(x: Any, y: Any) -> Any:
    return torch.div(x, y, rounding_mode="trunc")


def _prelu(x: torch.Tensor, slope: Any) -> torch.Tensor:
    return torch.where(x < 0, x * slope, x)


def _where(condition: Any, x: Any, y: Any) -> torch.Tensor:
    return torch.where(condition, x, y)


def _add_all(*values: Any) -> Any:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _mean(*values: Any) -> Any:
    return _add_all(*values) / len(values)


def _extreme(*values: Any, function: Callable[..., Any]) -> Any:
    found = values[0]
    for value in values[1:]:
        found = function(found, value)
    return found


def _max(*values: Any) -> Any:
    return _extreme(*values, function=torch.maximum)


def _min(*values: Any) -> Any:
    return _extreme(*values, function=torch.minimum)


_SEVERAL: dict[str, Callable[..., Any]] = {
    **{"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": _divide, "Pow": torch.pow},
    **{"Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt},
    **{"LessOrEqual": torch.le, "And": torch.logical_and, "Or": torch.logical_or},
    **{"Xor": torch.logical_xor, "PRelu": _prelu, "Where": _where, "Sum": _add_all},
    **{"Max": _max, "Min": _min, "Mean": _mean},
}


def _broadcast(*values: Any, function: Callable[..., Any], by: tuple[int, ...], dtype: Any) -> Any:
    given = []
    for value, more in zip(values, by, strict=True):
        if not isinstance(value, torch.Tensor):
            # A Python number would take part in type promotion differently from a tensor.
            value = torch.tensor(value, dtype=dtype)
        given.append(lifted(value, more))
    return function(*given)


@builds(*_SEVERAL)
def several(node: Node) -> Built:
    """Build operators that broadcast."""
    function = _SEVERAL[node.op]
    values = [node.value(i) for i in range(len(node.inputs))]
    dtypes = [v.dtype for v in values if not isinstance(v, Constant)]
    if node.op == "Div" and not dtypes[0].is_floating_point:
        function = _divide_integers
    if node.op == "Where":
        # The condition is bool, so that the dtype is that of the other two.
        others = values[1:]
        dtype = next((v.dtype for v in others if not isinstance(v, Constant)), None)
        if dtype is None:
            assert isinstance(others[0], Constant)
            dtype = DTYPES_OF_NUMPY.get(others[0].array.dtype.name, torch.float32)
        if isinstance(values[0], Constant):
            raise node.refuse("its condition is a constant of the model")
    elif node.op == "Pow" and not isinstance(values[0], Constant):
        dtype = values[0].dtype if values[0].dtype.is_floating_point else torch.float32
    else:
        dtype = dtypes[0]
    call = partial(_broadcast, function=function, by=lifts(values), dtype=dtype)
    return Built(call, node.operands())


DTYPES_OF_NUMPY = {
    **{"float16": torch.float32, "float32": torch.float32, "float64": torch.float32},
    **{"int32": torch.int32, "int64": torch.int64, "bool": torch.bool, "uint8": torch.uint8},
}


@builds("Clip")
def clip(node: Node) -> Built:
    """Build Clip, whose limits are attributes up to opset 10 and inputs later."""
    low, high = node.attr("min"), node.attr("max")
    if node.input(1) is not None:
        low = node.constant(1).item()
    if node.input(2) is not None:
        high = node.constant(2).item()
    if low is None and high is None:
        return Built(_same, [node.variable(0).name])
    return Built(partial(_clip, low=low, high=high), [node.variable(0).name])


def _clip(x: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    # One limit after the other, since ONNX gives `max` precedence where `min` exceeds it.
    x = x if low is None else x.clamp(min=low)
    return x if high is None else x.clamp(max=high)
