"""Passes over the FX graph of a module, applied to the copy that is traced."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import TraceError

from tpuport.foundation.errors import PortError, UsageError
from tpuport.foundation.pytree.clone import Cloner, clone_module
from tpuport.foundation.pytree.snapshot import Snapshot
from tpuport.foundation.user_frames import CodePlace, user_places

Pass = Callable[[fx.GraphModule], fx.GraphModule | None]


class _Capture(fx.Tracer):
    """A capture in which buffers are nodes, as parameters are: they may change between calls."""

    proxy_buffer_attributes = True


def with_passes(
    source: torch.nn.Module | Callable[..., Any],
    traced: torch.nn.Module | None,
    passes: Sequence[Pass],
) -> Callable[..., Any]:
    """Return a module's forward, or a function, as passes change its graph.

    Args:
        source: The module with plain tensors, or the function. It is not changed.
        traced: The copy of the module whose tensors the result computes with.
        passes: They are applied in order.

    Raises:
        PortError: There is no graph: the code branches on values, or sets attributes.
        UsageError: A pass returns no graph, a broken one, or one with parameters of its own.
    """
    plain: Any = source
    if isinstance(source, torch.nn.Module):
        plain = clone_module(source, lambda tensor: tensor)[0]
    graph = _captured(plain)
    for one in passes:
        graph = _applied(one, graph)
    if traced is None:
        return graph
    cloner = Cloner(lambda tensor: tensor)
    ours = dict(traced.named_modules(remove_duplicate=False))
    for name, module in plain.named_modules(remove_duplicate=False):
        cloner.memo[id(module)] = ours[name]
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                cloner.memo[id(tensor)] = getattr(ours[name], key)
    known = {id(p) for p in torch.nn.Module.parameters(plain)}
    added = [name for name, p in torch.nn.Module.named_parameters(graph) if id(p) not in known]
    if added:
        raise UsageError(
            f"a pass adds the parameters {', '.join(added)}, which are no state of the model; apply"
            " such a pass before: tpuport.convert(f(torch.fx.symbolic_trace(model)))"
        )
    changed = cloner.clone(graph)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Called so, the hooks of the module run.
        vars(traced)["forward"] = changed.forward
        try:
            return traced(*args, **kwargs)
        finally:
            del vars(traced)["forward"]

    return run


def _captured(plain: Any) -> fx.GraphModule:
    if isinstance(plain, fx.GraphModule):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's copy of its own LeafSpec
            return fx.GraphModule(plain, copy.deepcopy(plain.graph))
    is_module = isinstance(plain, torch.nn.Module)
    before = Snapshot([plain] if is_module else [])
    name = type(plain).__name__ if is_module else getattr(plain, "__name__", "function")
    try:
        graph = _Capture().trace(plain)
    except (TraceError, TypeError, RuntimeError, ValueError, AttributeError) as error:
        places = user_places(error.__traceback__)
        raise _no_graph(name, str(error), next(places, None)) from error
    if any(change is not None for change in before.changes()):
        raise _no_graph(name, "its forward sets attributes, which a graph does once", None)
    return fx.GraphModule(plain if is_module else torch.nn.Module(), graph, name)


def _no_graph(name: str, why: str, place: CodePlace | None) -> PortError:
    return PortError(
        f"passes= needs the FX graph of {name}, and there is none: {why}",
        code="TPU409",
        file=None if place is None else place.file,
        line=None if place is None else place.line,
        source_line=None if place is None else place.source,
        remedy=(
            "give convert the program of torch.export.export(model, args), whose graph has ATen's"
            " operations, or a GraphModule; or leave passes= out"
        ),
    )


def _applied(one: Pass, graph: fx.GraphModule) -> fx.GraphModule:
    """Return what a pass makes of a graph, checked."""
    name = getattr(one, "__name__", repr(one))
    made = one(graph)
    made = graph if made is None else made
    if not isinstance(made, fx.GraphModule):
        raise UsageError(
            f"the pass {name} returned a {type(made).__name__}; it takes a GraphModule, and returns"
            " one or changes it in place"
        )
    try:
        made.graph.lint()
        made.recompile()
    except RuntimeError as error:
        raise UsageError(f"the pass {name} made a broken graph: {error}") from error
    return made
