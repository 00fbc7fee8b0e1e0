"""Arguments of a call that are sizes: they become a shape, a count or a bound."""

import ast
from collections.abc import Iterator

from tpuport.rules._origins import last_name
from tpuport.source.rewrite.matching import Context

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
_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "data", "grad", "imag", "real", "shape"})
# A quick look at the name: nearly every call is of another function.
_NAMES = frozenset({*_FUNCTIONS, *_FUNCTIONAL, *_METHODS})
_KEYWORDS = frozenset(
    {
        "size",
        "steps",
        "start",
        "end",
        "step",
        "n",
        "m",
        "k",
        "chunks",
        "repeats",
        "shifts",
        "split_size_or_sections",
        "length",
        "num_classes",
        "pad",
        "low",
        "high",
        "diagonal",
        "shape",
    }
)


def size_arguments(node: ast.Call, context: Context) -> Iterator[ast.expr]:
    """Yield the expressions of a call that decide a size; those of a tuple or list one by one."""
    positions = _positions(node, context)
    if positions is None:
        return
    for index, argument in enumerate(node.args):
        if index in positions:
            yield from _elements(argument)
    for keyword in node.keywords:
        if keyword.arg in _KEYWORDS and not (positions == _STEPS and keyword.arg != "steps"):
            yield from _elements(keyword.value)


def is_of_a_tensor(size: ast.expr, context: Context) -> bool:
    """Return whether a size that counts as traced is surely computed from a tensor.

    It is not if it reads an attribute that no tensor has, such as `attn.num_heads`, or one of
    several results of an unknown call: `x, height, width = self.embed(x)`.
    """
    called = {node.func for node in ast.walk(size) if isinstance(node, ast.Call)}
    for node in ast.walk(size):
        match node:
            case ast.Attribute(attr=name, value=value) if node not in called:
                is_own = isinstance(value, ast.Name) and value.id == "self"
                if not is_own and name not in _TENSOR_ATTRIBUTES:
                    return False
            case ast.Name() if context.is_traced(node) and _is_one_of_several(node, context):
                return False
            case _:
                pass
    return True


def _is_one_of_several(name: ast.Name, context: Context) -> bool:
    """Return whether a name is bound by unpacking the result of an unknown call."""
    function = context.module.function(name)
    for node in () if function is None else context.module.inside(function):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Call() as call):
                bound = any(isinstance(t, ast.Name) and t.id == name.id for t in targets)
                if bound and not _is_of_torch(call, context):
                    return True
            case _:
                pass
    return False


def _is_of_torch(call: ast.Call, context: Context) -> bool:
    if (context.name(call.func) or "").startswith("torch."):
        return True
    return isinstance(call.func, ast.Attribute) and context.is_traced(call.func.value)


def _positions(node: ast.Call, context: Context) -> range | None:
    function = node.func
    if isinstance(function, ast.Name) and function.id == "range":
        return None if context.module.binds_otherwise("range") else _ALL
    if last_name(function) not in _NAMES:
        return None
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
