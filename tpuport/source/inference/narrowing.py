"""Type narrowing: the names that a test shows to be no tensors where it holds or fails."""

import ast

# Functions that test the class of their argument, each with whether they test for tensors.
_ASKING = {
    **dict.fromkeys(("is_tensor", "is_torch_tensor"), True),
    **dict.fromkeys(("is_numpy_array", "is_pil_image", "is_vision_image"), False),
}


def no_tensors(test: ast.expr, *, holds: bool) -> frozenset[str]:
    """Return the names that are certainly no tensors, given the outcome of a test.

    Args:
        test: A condition.
        holds: Whether it is true.
    """
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return no_tensors(operand, holds=not holds)
        case ast.BoolOp(op=op, values=values):
            # All parts of an `and` that holds hold; all parts of an `or` that fails fail.
            if isinstance(op, ast.And) is holds:
                return frozenset[str]().union(*(no_tensors(v, holds=holds) for v in values))
            return frozenset()
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), classes]):
            asked = classes.elts if isinstance(classes, ast.Tuple) else [classes]
            tensors = list(map(_may_be_tensor, asked))
            surely = not any(tensors) if holds else all(map(_is_tensor, asked))
            return frozenset({name}) if surely else frozenset()
        case ast.Call(
            func=ast.Name(id=function) | ast.Attribute(attr=function), args=[ast.Name(id=name)]
        ):
            asks_for_tensor = _ASKING.get(function)
            surely = asks_for_tensor is not None and asks_for_tensor is not holds
            return frozenset({name}) if surely else frozenset()
        case _:
            return frozenset()


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_tensor(node: ast.expr) -> bool:
    return _last(node) == "Tensor"


def _may_be_tensor(node: ast.expr) -> bool:
    """Return whether a class may be a tensor: any but those of Python, numpy and images."""
    return _last(node) not in _OTHERS


_OTHERS = frozenset(
    {
        "int",
        "float",
        "bool",
        "str",
        "bytes",
        "list",
        "tuple",
        "dict",
        "set",
        "ndarray",
        "Image",
        "Mapping",
        "MutableMapping",
        "Sequence",
        "Iterable",
        "Path",
        "PathLike",
        "Number",
        "Integral",
        "Real",
        "Module",
        "PreTrainedModel",
        "Callable",
        "Generator",
    }
)
