"""Programs compiled ahead of their first call, from arguments or from their shapes alone."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import torch
from torch.utils._pytree import tree_map

from tpuport.foundation import pytree
from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import backend
from tpuport.model.program_cache import Signature, compile_times
from tpuport.tracing.core import arguments
from tpuport.tracing.core.keys import unused_key
from tpuport.tracing.scan_layers import stacked_params
from tpuport.tracing.state.request import TraceRequest, TraceResult

if TYPE_CHECKING:
    from tpuport.model.ported_model import PortedModel


class Lowered:
    """A traced and lowered program, ready for `compile`, which may run in any thread."""

    def __init__(self, ported: "PortedModel", signature: Signature, lowered: Any) -> None:
        self._ported, self._lowered = ported, lowered
        shapes = ", ".join(kind for _, kind in signature.parts)
        self.name = f"{ported.report.model}.{signature.method}({shapes})"

    def compile(self) -> None:
        """Compile the program. The call that needs it finds it in jax's own cache."""
        with compile_times(self._ported.report):
            self._lowered.compile()


def lower(
    ported: "PortedModel", method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Lowered:
    """Trace and lower a method, and cache the program for calls with the same signature.

    Args:
        ported: The model.
        method: Name of the method.
        args: Tensors, arrays, or only their shapes: meta tensors and `jax.ShapeDtypeStruct`.
        kwargs: Likewise.

    Raises:
        PortError: the code cannot be ported exactly.
        UsageError: the model has no weights, or the program needs the value of an argument of
            which only the shape is given.
    """
    call = flatten_call(args, kwargs)
    values, metas, paths, spec = call.values, call.metas, call.paths, call.spec
    values = ported._program.placement.arguments(values, paths)
    state = ported._values()
    signature = _signature(ported, method, values, metas, paths, spec)
    compiled = ported._cache.get(signature)
    if compiled is None:
        with compile_times(ported.report):
            compiled = ported._compile(signature, state, values, metas, spec)
        signature = _signature(ported, method, values, metas, paths, spec)
        ported._cache[signature] = compiled
    picked = {name: state[name] for name in compiled.names}
    with compile_times(ported.report):
        return Lowered(ported, signature, compiled.run.lower(picked, unused_key(), values))


def shapes_of(
    ported: "PortedModel", method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Trace a method and return its output with a `jax.ShapeDtypeStruct` at each leaf.

    Args:
        ported: The model; its weights may be shapes.
        method: Name of the method.
        args: Tensors, arrays, or only their shapes.
        kwargs: Likewise.

    Raises:
        PortError: the code cannot be ported exactly.
    """
    leaves, spec, paths = arguments.flatten_call((args, kwargs))
    metas = [arguments.meta_argument(*pair) for pair in zip(leaves, paths, strict=True)]
    shapes = [
        jax.ShapeDtypeStruct(tuple(meta.shape), backend.jax_dtype(meta.dtype)) for meta in metas
    ]
    held: dict[str, TraceResult] = {}

    def pure(state: Any, key: Any, values: Any) -> Any:
        request = TraceRequest(
            method, stacked_params.unstack(state), key, values, metas, spec, checks=False
        )
        held["outcome"] = ported._program.trace(request)
        return held["outcome"].out_leaves

    out = jax.eval_shape(pure, ported._values(), unused_key(), shapes)
    leaves = arguments.static_leaves(out, held["outcome"].out_metas)
    return pytree.unflatten(held["outcome"].out_spec, leaves)


@dataclass(frozen=True)
class Shapes:
    """The arguments of a call, some of them given only as shapes.

    Attributes:
        values: an array or a `jax.ShapeDtypeStruct` for each leaf.
        metas: the meta tensor of each leaf (of a generator its class).
        paths: the path of each leaf.
        spec: the structure of the arguments.
    """

    values: list[Any]
    metas: list[Any]
    paths: list[str]
    spec: pytree.TreeSpec


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """Flatten a call's arguments: tensors, arrays, meta tensors and `jax.ShapeDtypeStruct`.

    Raises:
        UsageError: a leaf is of another kind.
    """
    leaves, spec, paths = arguments.flatten_call(_as_meta((args, kwargs)))
    return Shapes(*_values(leaves, paths), paths, spec)


def _as_meta(value: Any) -> Any:
    """Replace each `jax.ShapeDtypeStruct` among the arguments by a meta tensor."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return arguments.meta_argument(leaf, "")
        return leaf

    # torch's tree_map, because jax's sorts dicts and their order is part of the signature.
    return tree_map(convert, value)


def _values(leaves: list[Any], paths: list[str]) -> tuple[list[Any], list[Any]]:
    """Return the array of each argument (on the meta device its shape), and its meta tensor."""
    values, metas = [], []
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta":
            values.append(jax.ShapeDtypeStruct(tuple(leaf.shape), backend.jax_dtype(leaf.dtype)))
            metas.append(leaf)
        else:
            (value,), (meta,) = arguments.argument_arrays([leaf], [path])
            values.append(value)
            metas.append(meta)
    return values, metas


def _signature(
    ported: "PortedModel",
    method: str,
    values: list[Any],
    metas: list[Any],
    paths: list[str],
    spec: Any,
) -> Signature:
    for index in ported._program.plan_for(method, spec).host_args:
        if isinstance(values[index], jax.ShapeDtypeStruct):
            raise UsageError(
                f"the program depends on the value of {paths[index].lstrip('.')}, and only its"
                " shape is given; pass a tensor with the value"
            )
    return ported._signature(method, values, metas, paths, spec)
