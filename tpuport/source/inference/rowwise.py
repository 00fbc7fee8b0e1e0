"""Functions that can be computed on rows selected by a mask, shared by rules and helpers.

The number of selected rows depends on data, so the static form is "all rows, and a mask of those
that count". A function is listed here if it can be computed from that form.
"""

# Each row of the result depends on the same row of every argument, and on nothing else.
ELEMENTWISE = frozenset(
    {
        *("abs", "absolute", "acos", "add", "asin", "atan", "atan2", "bfloat16", "bitwise_and"),
        *("bitwise_not", "bitwise_or", "bitwise_xor", "bool", "ceil", "clamp", "clamp_max"),
        *("clamp_min", "clip", "clone", "contiguous", "cos", "cosh", "detach", "div", "divide"),
        *("double", "elu", "eq", "erf", "exp", "expm1", "float", "floor", "fmod", "full_like"),
        *("ge", "gelu", "gt", "half", "hardtanh", "hypot", "int", "isfinite", "isinf", "isnan"),
        *("le", "leaky_relu", "log", "log10", "log1p", "log2", "logaddexp", "logical_and"),
        *("logical_not", "logical_or", "logical_xor", "logsigmoid", "long", "lt", "masked_fill"),
        *("maximum", "minimum", "mish", "mul", "multiply", "nan_to_num", "ne", "neg", "negative"),
        *("ones_like", "pow", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt"),
        *("sigmoid", "sign", "silu", "sin", "sinh", "softplus", "softsign", "sqrt", "square"),
        *("sub", "subtract", "tan", "tanh", "to", "true_divide", "trunc", "type", "where", "xlogy"),
        "zeros_like",
    }
)
REDUCTIONS = frozenset({"all", "amax", "amin", "any", "max", "mean", "min", "prod", "sum"})
# Means or sums over all rows of a loss of each row.
LOSSES = frozenset(
    {
        *("binary_cross_entropy_with_logits", "cross_entropy", "huber_loss", "l1_loss"),
        *("mse_loss", "smooth_l1_loss"),
    }
)
# Loss modules, each with the function that it computes.
LOSS_MODULES = {
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy",
    "HuberLoss": "huber_loss",
    "L1Loss": "l1_loss",
    "MSELoss": "mse_loss",
    "SmoothL1Loss": "smooth_l1_loss",
}
JOINS = frozenset({"cat", "concat", "concatenate"})
RESHAPES = frozenset({"reshape", "view"})
# Attributes that are static although the number of rows is not.
HOST_ATTRIBUTES = frozenset({"device", "dtype", "ndim", "requires_grad"})
