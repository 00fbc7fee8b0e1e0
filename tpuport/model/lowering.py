"""Programs compiled ahead of their first call, from arguments or from their shapes alone."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import torch

from tpuport.foundation import pytree
from tpuport.foundation.interop import backend
from tpuport.model.program_cache import CachedProgram, CallArguments, compile_times
from tpuport.tracing.core import arguments
from tpuport.tracing.core.keys import unused_key
from tpuport.tracing.scan_layers import stacked_params
from tpuport.tracing.state.request import TraceRequest, TraceResult

if TYPE_CHECKING:
    from tpuport.model.ported_model import PortedModel


class Lowered:
    """A traced and lowered program, ready for `compile`, which may run in any thread."""

    def __init__(self, ported: "PortedModel", compiled: CachedProgram, lowered: Any) -> None:
        self._ported, self._lowered = ported, lowered
        shapes = ", ".join(kind for _, kind in compiled.signature.parts)
        self.name = f"{ported.report.model}.{compiled.signature.method}({shapes})"

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
    call = replace(call, values=ported._placement.arguments(call.values, call.paths))
    state = ported._values()
    with compile_times(ported.report):
        compiled, _ = ported._program_for(method, state, call, is_call=False)
        values = [*call.values, *([] if compiled.tape is None else compiled.tape.taken)]
        lowered = compiled.run.lower(compiled.picked(state), unused_key(), values)
        return Lowered(ported, compiled, lowered)


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
    call = shapes_in(args, kwargs)
    held: dict[str, TraceResult] = {}

    def pure(state: Any, key: Any, values: Any) -> Any:
        request = TraceRequest(
            *(method, stacked_params.unstack(state), key, values, call.metas, call.spec),
            checks=False,
            draws=True,  # of what is drawn before a call, it takes the shapes only
        )
        held["outcome"] = ported._tracer.trace(request)
        return held["outcome"].out_leaves

    out = jax.eval_shape(pure, ported._values(), unused_key(), call.values)
    leaves = arguments.static_leaves(out, held["outcome"].out_metas)
    return pytree.unflatten(held["outcome"].out_spec, leaves)


def shapes_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """Flatten a call's arguments, all of them as shapes."""
    leaves, spec, paths = arguments.flatten_call((args, kwargs))
    metas = [arguments.meta_argument(*pair) for pair in zip(leaves, paths, strict=True)]
    values = [jax.ShapeDtypeStruct(tuple(m.shape), backend.jax_dtype(m.dtype)) for m in metas]
    return CallArguments(values, metas, paths, spec)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """Flatten a call's arguments: tensors, arrays, meta tensors and `jax.ShapeDtypeStruct`.

    Raises:
        UsageError: a leaf is of another kind.
    """
    leaves, spec, paths = pytree.flatten_with_paths((args, kwargs), leaf=_is_input, objects=True)
    inputs = [_input(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
    return CallArguments([v for v, _ in inputs], [m for _, m in inputs], paths, spec)


def _is_input(value: Any) -> bool:
    return pytree.is_leaf(value) or isinstance(value, jax.ShapeDtypeStruct)


def _input(leaf: Any, path: str) -> tuple[Any, Any]:
    """Return the array of an argument, only its shape if it has no value, and its meta tensor."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        leaf = arguments.meta_argument(leaf, path)
    if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta":
        return jax.ShapeDtypeStruct(tuple(leaf.shape), backend.jax_dtype(leaf.dtype)), leaf
    (value,), (meta,) = arguments.argument_arrays([leaf], [path])
    return value, meta
