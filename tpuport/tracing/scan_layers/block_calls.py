"""Calls of repeated blocks: equal ones are calls of one function."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import torch
from jax.extend import core

from tpuport.foundation import pytree
from tpuport.tracing.attention.masks.rematerialize import Recipes
from tpuport.tracing.attention.options import options_for
from tpuport.tracing.core.context import KeyStream, Trace
from tpuport.tracing.core.jaxpr_dce import without_dead_code
from tpuport.tracing.core.regions import Body
from tpuport.tracing.core.sparse_rows import has_sparse_gradient
from tpuport.tracing.core.storage import differentiable
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import value_of
from tpuport.tracing.scan_layers.families import Member, families
from tpuport.tracing.scan_layers.shared_programs import NAME, SharedPrograms, strong


@dataclass
class BlockRecord:
    """A record of what became of the calls of one family of blocks.

    Attributes:
        names: The fqns of the blocks.
        programs: How many different programs their calls are.
        shared: How many calls have the program of an earlier one.
    """

    names: list[str]
    programs: int = 0
    shared: int = 0


class BlockCalls:
    """The repeated blocks of a model in one trace.

    Each call is traced into a jaxpr of its own, and calls whose jaxprs are equal become calls of
    one jitted function. Nothing is assumed of a block: its code runs, on the objects that it is
    given, and two calls are alike if their programs are.

    Args:
        trace: The running trace.
        module: The traced copy of the model.
    """

    def __init__(self, trace: Trace, module: torch.nn.Module) -> None:
        self.trace = trace
        self.members: dict[int, Member] = {}
        self.records: dict[int, BlockRecord] = {}
        self.programs = SharedPrograms()
        self.recipes = Recipes(NAME)
        # Without this, reading a tensor's size would go through the modes of the trace.
        with torch._C.DisableTorchFunction():
            found = families(module)
        for family in found:
            # Which rows of a table a loop reads is not known outside of it.
            if trace.options.takes_gradients and has_sparse_gradient(family.members[0].module):
                continue
            self.records[id(family)] = BlockRecord([member.fqn for member in family.members])
            for member in family.members:
                self.members.setdefault(id(member.module), member)

    def call(
        self,
        member: Member,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any],
    ) -> Any:
        """Call a block as a function that it shares with the calls that are equal to it."""
        trace, streams = self.trace, list(self.trace.streams)
        drawn: list[Any] = []
        body = Body(trace, lambda: self._explored(member, args, kwargs, run))
        _read_outside(args, kwargs)

        def function(starts: list[Any]) -> Any:
            with _counted_from(streams, starts):
                results = body.run()
                drawn.extend(stream.count for stream in streams)
            return jax.tree.map(strong, results)

        starts = [stream.number for stream in streams]
        with _named_after_all(trace, member):
            closed, shape = jax.make_jaxpr(function, return_shape=True)(starts)
        program, operands = _lifted(without_dead_code(closed))
        shared, is_known = self.programs.find(program)
        record = self.records[id(member.family)]
        record.programs += not is_known
        record.shared += is_known
        values = shared(*operands, *jax.tree.leaves(starts))
        counts = [stream.count for stream in streams]
        result = body.settle(*jax.tree.unflatten(jax.tree.structure(shape), values))
        for stream, count, number in zip(streams, counts, drawn, strict=True):
            # A number that depends on data is an output, which `settle` has set.
            is_output = isinstance(number, jax.core.Tracer)
            stream.count = count + (stream.count if is_output else number)
        return result

    def _explored(
        self, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> Any:
        """Run a block's code; branches on values that it makes are explored in here."""
        explorer, promoted = self.trace.explorer, dict(self.trace.promoted)

        def thunk() -> Any:
            self._make_masks((args, kwargs))
            return run(*args, **kwargs)

        roots = [member.module, args, kwargs]
        result = thunk() if explorer is None else explorer.run_inside("block", thunk, roots)
        _forget_promoted(self.trace, promoted)
        return result

    def _make_masks(self, given: Any) -> None:
        """Compute masks among the arguments from the short arrays behind them.

        Attention needs their structure, and a program whose input is an array of the scores' size
        would have to read it.
        """
        if options_for(self.trace.options.target) is None:
            return
        for leaf in pytree.flatten(given)[0]:
            if isinstance(leaf, TracedTensor) and leaf._storage.trace is self.trace:
                frozen = leaf._frozen or not differentiable(leaf.dtype)
                recipe = self.recipes.of(leaf._elem, frozen=frozen)
                if recipe is not None:
                    leaf._keep(recipe.made(recipe.inputs))

    def release(self) -> None:
        """Drop what belongs to the trace; the records are kept."""
        self.members.clear()
        self.programs.clear()
        self.recipes = Recipes(NAME)


def _read_outside(*given: Any) -> None:
    """Read the traced tensors among arguments, so that reads inside add no operations.

    The first block may get a value with jax's weak type or a gradient, and the others one without:
    the conversion, or `stop_gradient` under `no_grad`, would make two programs of one.
    """
    for leaf in pytree.flatten(given)[0]:
        if isinstance(leaf, TracedTensor) and leaf._storage.trace is not None:
            if getattr(leaf._elem, "weak_type", False):
                leaf._keep(strong(leaf._elem))
            value_of(leaf)


def _lifted(closed: Any) -> tuple[Any, list[Any]]:
    """Return a program whose traced constants are inputs, before its own, and those constants."""
    jaxpr = closed.jaxpr
    pairs = list(zip(jaxpr.constvars, closed.consts, strict=True))
    traced = [(var, value) for var, value in pairs if isinstance(value, jax.core.Tracer)]
    fixed = [(var, value) for var, value in pairs if not isinstance(value, jax.core.Tracer)]
    program = core.Jaxpr(
        [var for var, _ in fixed],
        [*(var for var, _ in traced), *jaxpr.invars],
        jaxpr.outvars,
        jaxpr.eqns,
        jaxpr.effects,
        jaxpr.debug_info.with_unknown_names(),
    )
    return core.ClosedJaxpr(program, [value for _, value in fixed]), [v for _, v in traced]


@contextmanager
def _counted_from(streams: list[KeyStream], starts: list[Any]) -> Iterator[None]:
    """Count random numbers from a traced start inside, so that blocks do not differ in it."""
    saved = [(stream.count, stream.start) for stream in streams]
    for stream, start in zip(streams, starts, strict=True):
        stream.count, stream.start = 0, start
    try:
        yield
    finally:
        for stream, (count, start) in zip(streams, saved, strict=True):
            stream.count, stream.start = count, start


@contextmanager
def _named_after_all(trace: Trace, member: Member) -> Iterator[None]:
    """Name instructions inside after all blocks of the family."""
    outer, trace.recorder.block = trace.recorder.block, (member.fqn, member.everyone)
    try:
        yield
    finally:
        trace.recorder.block = outer


def _forget_promoted(trace: Trace, before: Mapping[int, Any]) -> None:
    """Forget host tensors that the block made and wrote traced values to, if it alone holds them.

    Dropout's mask is one, made empty and filled in place: it would be a result of the block.
    """
    for key in trace.promoted.keys() - before.keys():
        tensor, storage = trace.promoted.pop(key)
        trace.constants.pop(id(tensor), None)
        held, form = weakref.ref(tensor), tensor.to("meta")
        del tensor
        # The trace itself holds the memory once, so that no other tensor gets its address.
        if held() is not None or torch._C._storage_Use_Count(key) > 1:  # pyright: ignore
            kept = held()
            trace.promoted[key] = (form if kept is None else kept, storage)
