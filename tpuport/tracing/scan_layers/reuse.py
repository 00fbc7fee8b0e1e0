"""Calls of repeated blocks: the first is traced as a pure function, the others reuse it."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import TpuportError
from tpuport.foundation.pytree.compare import same_value
from tpuport.tracing.attention.masks.rematerialize import Recipe, Recipes
from tpuport.tracing.attention.options import options_for
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.arguments import program_leaf
from tpuport.tracing.core.autocast import autocast_dtype, cuda_is_on
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.speculation import RestartTrace, UndecidedBranch
from tpuport.tracing.core.tensor import Storage, TracedTensor
from tpuport.tracing.dynamic_shapes.extents import extents_of
from tpuport.tracing.guards.describe import changed_name
from tpuport.tracing.guards.watch import is_iterator, is_unchanged
from tpuport.tracing.scan_layers.attribute_reads import note_reads
from tpuport.tracing.scan_layers.call_order import LastCalls
from tpuport.tracing.scan_layers.families import Family, Member, families
from tpuport.tracing.scan_layers.trace_block import inputs_of, is_frozen, trace_block
from tpuport.tracing.scan_layers.traced_block import NAME, Arguments, BlockEntry, NotPure

# Exceptions that a block may raise on stand-ins of its arguments.
_FAULTS = (
    *(
        UndecidedBranch,
        TpuportError,
        RuntimeError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
    ),
    *(AssertionError, ArithmeticError),
)


@dataclass
class BlockRecord:
    """A record of how the blocks of one family were traced.

    Attributes:
        names: The fqns of the blocks.
        traced: How often a block was traced as a function.
        reused: How many calls reused one.
        reason: Why blocks were traced one by one, if they were.
        changed: What had changed outside of the block, so that it was retraced.
    """

    names: list[str]
    traced: int = 0
    reused: int = 0
    reason: str | None = None
    changed: str | None = None


class BlockCalls:
    """The repeated blocks of a model in one trace.

    Args:
        trace: The running trace.
        module: The traced copy of the model.
        leaves: The leaves of its state.
    """

    def __init__(self, trace: Trace, module: torch.nn.Module, leaves: Iterable[Any]) -> None:
        self.trace = trace
        self.members: dict[int, Member] = {}
        self.records: dict[int, BlockRecord] = {}
        self.known: dict[Any, list[BlockEntry]] = {}
        self.policies: dict[int, tuple[str | None, ...]] = {}
        self.recipes = Recipes(NAME)
        # Without this, reading a tensor's size would go through the modes of the trace.
        with torch._C.DisableTorchFunction():
            found = families(module, leaves)
        for family in found:
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
        """Call a block: reuse its trace, trace it now, or inline it if it is impure."""
        record = self.records[id(member.family)]
        explorer = self.trace.explorer
        apart = {} if explorer is None else explorer.plan.apart
        first = member.family.members[0].fqn
        # Hooks may be added while the model runs: transformers does so to collect hidden states.
        if first in apart:
            taken = apart[first]
        elif member.is_changed:
            taken = f"{member.fqn}: the model changed it while it ran"
        elif member.has_hooks:
            taken = "it has hooks"
        else:
            taken = flatten_call(self.trace, member, args, kwargs, self.recipes)
        if isinstance(taken, str):
            record.reason = taken
            return run(*args, **kwargs)
        given, key = taken
        key = (id(member.family), self._policies(member), *key)
        entry = next((e for e in self.known.get(key, ()) if self._fits(e, member, given)), None)
        if entry is None:
            known = self.known.setdefault(key, [])
            like = next((e for e in reversed(known) if _reads_the_same(e, member)), None)
            record.changed = record.changed or (like and changed_name(like.outside))
            known.append(entry := self._traced(member, given, run))
            record.traced += 1
        else:
            record.reused += 1
            if _lasts(entry, member.family).is_to_compare(member.fqn):
                self._compare(entry, member, given, run)
        note_reads(member, entry.noted)
        if self.trace.recorder.watcher is not None:
            self.trace.recorder.watcher.found += entry.outside
        self.trace.recorder.counters.add(entry.counts)
        return self._emit(entry, member, given)

    def _traced(
        self, member: Member, given: Arguments, run: Callable[..., Any], *, withhold: bool = True
    ) -> BlockEntry:
        """Trace a block as a function.

        Raises:
            Restart: It is not pure; its family is to be traced one by one.
        """
        try:
            return trace_block(self.trace, member, given, run, withhold=withhold)
        except NotPure as error:
            reason = str(error)
        except _FAULTS as error:
            # Either the stand-ins of this call are at fault or the code itself is. In the second
            # case it fails again when it runs inline, with the message that belongs there.
            reason = f"it raised {type(error).__name__}"
        # Tracing again from the start undoes what the block did outside of the model.
        raise self._apart(member, reason)

    def _apart(self, member: Member, reason: str) -> RestartTrace:
        first = member.family.members[0].fqn
        return RestartTrace(apart=(first, f"{member.fqn}: {reason}"))

    def _compare(
        self, entry: BlockEntry, member: Member, given: Arguments, run: Callable[..., Any]
    ) -> None:
        """Trace a block that is about to reuse a function, and check that both are the same.

        What its code reads is recorded (`Outside`); this finds what recording missed.

        Raises:
            Restart: The block computes something else.
        """
        # Its attributes are not hidden here: code can detect a hidden one without reading it.
        if not self._traced(member, given, run, withhold=False).is_like(entry):
            first = member.family.members[0].fqn
            raise self._apart(member, f"it differs from {first}, for no recorded reason")

    def release(self) -> None:
        """Drop what belongs to the trace; the records are kept."""
        self.members.clear()
        self.known.clear()

    def _policies(self, member: Member) -> tuple[str | None, ...]:
        """Return the remat policies of a block and of the modules in it."""
        if id(member) not in self.policies:
            fqns = (f"{member.fqn}.{name}" if name else member.fqn for name, _ in member.modules)
            self.policies[id(member)] = tuple(self.trace.remat_policy(fqn) for fqn in fqns)
        return self.policies[id(member)]

    def _fits(self, entry: BlockEntry, member: Member, given: Arguments) -> bool:
        """Return whether a traced function may be reused for this block."""
        placement = self.trace.options.placement
        return (
            _reads_the_same(entry, member)
            and not (entry.tells_views and given.has_views)
            and is_unchanged(entry.outside)
            and all(
                placement is not None and placement.spec(member.fqn + fqn, side, ndim) == spec
                for fqn, side, ndim, spec in entry.places
            )
        )

    def _emit(self, entry: BlockEntry, member: Member, given: Arguments) -> Any:
        trace = self.trace
        values = iter(entry.run(*inputs_of(trace, member, given)))
        for stream, count in zip(trace.streams, entry.draws, strict=True):
            stream.count += count
            stream.used = stream.used or count > 0
        leaves = [self._leaf(d, member, given, values) for d in entry.outputs]
        return pytree.unflatten(entry.spec, leaves)

    def _leaf(self, description: Any, member: Member, given: Arguments, values: Any) -> Any:
        match description:
            case ("argument", index):
                return given.leaves[index]
            case ("state", name):
                return member.state[name]
            case ("host", tensor):
                return tensor
            case (_, meta, frozen, bounds):
                value = next(values)
                made = TracedTensor(Storage(value, self.trace), (), meta, value, frozen)
                made._bounds = bounds
                return made


def _lasts(entry: BlockEntry, family: Family) -> LastCalls:
    """Return the order of a function's calls for blocks other than the one that was traced."""
    if entry.lasts is None:
        alike = [m.fqn for m in family.members if _reads_the_same(entry, m)]
        places = {fqn: place for place, fqn in enumerate(alike)}
        entry.lasts = LastCalls(places, places[entry.fqn])
    return entry.lasts


def _reads_the_same(entry: BlockEntry, member: Member) -> bool:
    return all(
        name in member.varying and same_value(value, member.varying[name])
        for name, value in entry.read.items()
    )


def flatten_call(
    trace: Trace, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any], recipes: Recipes
) -> tuple[Arguments, Any] | str:
    """Return a call's arguments and the key of its function, or why the call cannot be a function.

    It cannot be one with traced numbers, sizes that depend on data, generators, iterators, jax
    arrays, weights of the block itself, and containers that hold more than their items.
    """
    leaves, spec = pytree.flatten((args, kwargs), leaf=program_leaf, objects=True)
    reason = _why_not_static(spec)
    if reason is not None:
        return reason
    kinds: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, sym_numbers.SYMBOLIC):
            return f"it is called with a {type(leaf).__name__}"
        if isinstance(leaf, TracedTensor):
            reason = _why_no_input(trace, member, leaf)
            if reason is not None:
                return reason
            layout = (tuple(leaf.shape), leaf.dtype, leaf.stride())
            kinds.append((*layout, is_frozen(leaf), leaf._bounds, hasattr(leaf, "_is_param")))
        elif trace.alias(leaf) is not None:
            return "it is called with a tensor of the host that has become a traced one"
        else:
            kinds.append((id(leaf), leaf._version))
    modes = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        autocast_dtype(),
        cuda_is_on(),
        len(trace.streams),
        trace.error_code is None,
    )
    given = Arguments(leaves, spec)
    if options_for(trace.options.target) is not None:
        given.recipes = _recipes(given, recipes)
    made = tuple((i, recipe.key) for i, recipe in given.recipes.items())
    return given, (spec.key, tuple(kinds), modes, made)


def _why_not_static(spec: pytree.TreeSpec) -> str | None:
    """Return why the non-tensor arguments do not determine a call, or None if they do."""
    if any(is_iterator(value) for value in pytree.statics_of(spec)):
        return "it is called with an iterator"
    if any(_has_attributes(container) for container in spec.containers.values()):
        return "it is called with a list or set that has attributes"
    return None


def _why_no_input(trace: Trace, member: Member, leaf: TracedTensor) -> str | None:
    """Return why a traced argument cannot be an input of a block's function, or None if it can."""
    if leaf._storage.trace is not trace:
        return "it is called with a tensor of another program"
    if extents_of(leaf):
        return "it is called with a tensor whose size depends on data"
    if any(not name.startswith("_") for name in vars(leaf)):
        return "it is called with a tensor that has attributes"
    if any(leaf._storage is own._storage for own in member.state.values()):
        return "it is called with its own state"
    return None


def _has_attributes(container: Any) -> bool:
    """Return whether a container has attributes, which a copy of it would not have."""
    sequence = isinstance(container, (list, tuple, set, frozenset, deque))
    return sequence and bool(pytree.attributes_of(container))


def _recipes(given: Arguments, recipes: Recipes) -> dict[int, Recipe]:
    """Return the recipes of the masks among the arguments; attention needs their structure."""
    found = {}
    for index, leaf in enumerate(given.traced):
        frozen = leaf._frozen or not leaf.dtype.is_floating_point
        recipe = recipes.of(leaf._elem, frozen=frozen)
        if recipe is not None:
            found[index] = recipe
    return found
