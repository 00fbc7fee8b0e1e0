"""Which arguments of a call are sizes: what becomes a shape, a count or a bound."""

import ast
from collections.abc import Iterator

from tpuport.source.engine import Context

_ALL = range(99)
_AFTER_FIRST = range(1, 99)
_STEPS = range(2, 3)
# The positions of the sizes among the arguments; for methods without the tensor itself.
_FUNCTIONS: dict[str, range] = {
    **dict.fromkeys(("zeros", "ones", "empty", "rand", "randn", "arange", "randint"), _ALL),
    **dict.fromkeys(("eye", "randperm"), _ALL),
    "full": range(1),
    **dict.fromkeys(("linspace", "logspace"), _STEPS),
    **dict.fromkeys(
        ("reshape", "tile", "broadcast_to", "narrow", "split", "chunk", "roll", "topk", "tril"),
        _AFTER_FIRST,
    ),
    **dict.fromkeys(("triu", "unflatten", "tensor_split"), _AFTER_FIRST),
}
_FUNCTIONAL: dict[str, range] = dict.fromkeys(("pad", "one_hot", "interpolate"), range(1, 2))
_METHODS: dict[str, range] = {
    **dict.fromkeys(("reshape", "view", "expand", "repeat", "tile", "broadcast_to"), _ALL),
    **dict.fromkeys(("unflatten", "narrow", "split", "chunk", "tensor_split", "roll"), _ALL),
    **dict.fromkeys(("topk", "unfold", "new_zeros", "new_ones", "new_empty", "tril"), _ALL),
    "triu": _ALL,
    "new_full": range(1),
}
_KEYWORDS = frozenset(
    {
        *("size", "steps", "start", "end", "step", "n", "m", "k", "chunks", "repeats", "shifts"),
        *(
            "split_size_or_sections",
            "length",
            "num_classes",
            "pad",
            "low",
            "high",
            "diagonal",
            "shape",
        ),
    }
)


def size_arguments(node: ast.Call, context: Context) -> Iterator[ast.expr]:
    """The expressions of a call that decide a size; those of a tuple or list one by one."""
    positions = _positions(node, context)
    if positions is None:
        return
    for index, argument in enumerate(node.args):
        if index in positions:
            yield from _elements(argument)
    for keyword in node.keywords:
        if keyword.arg in _KEYWORDS and not (positions == _STEPS and keyword.arg != "steps"):
            yield from _elements(keyword.value)


def _positions(node: ast.Call, context: Context) -> range | None:
    function = node.func
    if isinstance(function, ast.Name) and function.id == "range":
        return None if context.module.binds_otherwise("range") else _ALL
    name = context.name(function)
    if name is not None:
        root, _, last = name.rpartition(".")
        table = {"torch": _FUNCTIONS, "torch.nn.functional": _FUNCTIONAL}.get(root, {})
        return table.get(last)
    if isinstance(function, ast.Attribute) and context.is_traced(function.value):
        return _METHODS.get(function.attr)
    return None


def _elements(argument: ast.expr) -> Iterator[ast.expr]:
    match argument:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _elements(part)
        case ast.Starred(value=value):
            yield value
        case _:
            yield argument
