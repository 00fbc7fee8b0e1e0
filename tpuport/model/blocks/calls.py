"""Calls of blocks that are alike: the first is traced as a pure function, the others reuse it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tpuport.errors import TpuportError
from tpuport.model import numbers, structure
from tpuport.model.arguments import program_leaf
from tpuport.model.attention_choice import options_for
from tpuport.model.autocast import autocast_dtype, cuda_is_on
from tpuport.model.blocks.alike import Member, families, same_value
from tpuport.model.blocks.body import (
    NAME,
    Arguments,
    Entry,
    NotPure,
    inputs_of,
    is_frozen,
    trace_block,
)
from tpuport.model.bounded.extents import extents_of
from tpuport.model.masks.recipes import Recipe, Recipes
from tpuport.model.plan import Restart, Undecided
from tpuport.model.tensor import Storage, TracedTensor
from tpuport.model.trace import Trace


@dataclass
class BlockRecord:
    """What became of the blocks of one family.

    Attributes:
        names: the fqns of the blocks.
        traced: how often a block was traced as a function.
        reused: how many calls reused one.
        reason: why blocks were traced each by itself, if they were.
    """

    names: list[str]
    traced: int = 0
    reused: int = 0
    reason: str | None = None


class BlockCalls:
    """The repeated blocks of a model in one trace.

    Args:
        trace: the running trace.
        module: the traced copy of the model.
        leaves: the state of it.
    """

    def __init__(self, trace: Trace, module: torch.nn.Module, leaves: Iterable[Any]) -> None:
        self.trace = trace
        self.members: dict[int, Member] = {}
        self.records: dict[int, BlockRecord] = {}
        self.known: dict[Any, list[Entry]] = {}
        self.policies: dict[int, tuple[str | None, ...]] = {}
        self.recipes = Recipes(NAME)
        # Else each size that a tensor is asked for passes the modes of the trace.
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
        """Call a block: as a function that is known already, as one that is traced now, or as it
        is if it is none.
        """
        record = self.records[id(member.family)]
        apart = self.trace.explorer.plan.apart
        first = member.family.members[0].fqn
        # Hooks may come while the model runs: transformers' that collect hidden states do.
        taken = None
        if first in apart:
            record.reason = apart[first]
        elif member.is_changed:
            record.reason = f"{member.fqn}: the model changed it while it ran"
        elif member.has_hooks:
            record.reason = "it has hooks"
        else:
            taken = take_apart(self.trace, args, kwargs, self.recipes)
        if taken is None:
            return run(*args, **kwargs)
        given, key = taken
        key = (id(member.family), self._policies(member), *key)
        entry = next((e for e in self.known.get(key, ()) if self._fits(e, member)), None)
        if entry is None:
            reason = ""
            try:
                entry = trace_block(self.trace, member, given, run)
            except NotPure as error:
                reason = str(error)
            except (
                Undecided,
                TpuportError,
                RuntimeError,
                TypeError,
                ValueError,
                LookupError,
                AttributeError,
            ) as error:
                # Either the stand-ins of this call are at fault or the code itself is: then it
                # fails again as it is, with the message that belongs there.
                reason = f"it raised {type(error).__name__}"
            if entry is None:
                # What it did to anything outside of the model is undone by starting again.
                raise Restart(apart=(first, f"{member.fqn}: {reason}"))
            record.traced += 1
            self.known.setdefault(key, []).append(entry)
        else:
            record.reused += 1
            self.trace.counters.add(entry.counts)
        return self._emit(entry, member, given)

    def release(self) -> None:
        """Drop what belongs to the trace; the records stay."""
        self.members.clear()
        self.known.clear()

    def _policies(self, member: Member) -> tuple[str | None, ...]:
        """The remat policies of a block and what is in it."""
        if id(member) not in self.policies:
            fqns = (f"{member.fqn}.{name}" if name else member.fqn for name, _ in member.modules)
            self.policies[id(member)] = tuple(self.trace.remat(fqn) for fqn in fqns)
        return self.policies[id(member)]

    def _fits(self, entry: Entry, member: Member) -> bool:
        """Whether a function stands for a block, too."""
        placement = self.trace.placement
        return all(
            name in member.varying and same_value(value, member.varying[name])
            for name, value in entry.read.items()
        ) and all(
            placement is not None and placement.spec(member.fqn + fqn, side, ndim) == spec
            for fqn, side, ndim, spec in entry.places
        )

    def _emit(self, entry: Entry, member: Member, given: Arguments) -> Any:
        trace = self.trace
        values = iter(entry.run(*inputs_of(trace, member, given)))
        for stream, count in zip(trace.streams, entry.draws, strict=True):
            stream.count += count
            stream.used = stream.used or count > 0
        leaves = [self._leaf(d, member, given, values) for d in entry.outputs]
        return structure.rebuild(entry.spec, leaves)

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


def take_apart(
    trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], recipes: Recipes
) -> tuple[Arguments, Any] | None:
    """A call's arguments and what a function is traced for, None where it cannot be one.

    It cannot with traced numbers, sizes that depend on data, generators, and arrays of jax.
    """
    leaves, spec = structure.flatten((args, kwargs), leaf=program_leaf, objects=True)
    kinds: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, numbers.SYMBOLIC):
            return None
        if isinstance(leaf, TracedTensor):
            public = any(not name.startswith("_") for name in vars(leaf))
            if leaf._storage.trace is not trace or extents_of(leaf) or public:
                return None
            layout = (tuple(leaf.shape), leaf.dtype, leaf.stride())
            kinds.append((*layout, is_frozen(leaf), leaf._bounds, hasattr(leaf, "_is_param")))
        elif trace.alias(leaf) is not None:
            return None
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
    if options_for(trace.target) is not None:
        given.recipes = _recipes(given, recipes)
    made = tuple((i, recipe.key) for i, recipe in given.recipes.items())
    return given, (spec.key, tuple(kinds), modes, made)


def _recipes(given: Arguments, recipes: Recipes) -> dict[int, Recipe]:
    """The masks among the arguments, which attention is to know the structure of."""
    found = {}
    for index, leaf in enumerate(given.traced):
        frozen = leaf._frozen or not leaf.dtype.is_floating_point
        recipe = recipes.of(leaf._elem, frozen=frozen)
        if recipe is not None:
            found[index] = recipe
    return found
