"""Calls of blocks that are alike: the first is traced as a pure function, the others reuse it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tpuport.errors import TpuportError
from tpuport.model import numbers, structure
from tpuport.model.arguments import program_leaf
from tpuport.model.autocast import autocast_dtype, cuda_is_on
from tpuport.model.blocks.alike import Member, families, same_value
from tpuport.model.blocks.body import Arguments, Entry, NotPure, inputs_of, trace_block
from tpuport.model.bounded.extents import extents_of
from tpuport.model.plan import Undecided
from tpuport.model.tensor import Storage, TracedTensor
from tpuport.model.trace import Trace


@dataclass
class BlockRecord:
    """What became of the blocks of one family, for the report.

    Attributes:
        names: the fqns of the blocks.
        traced: how often a block was traced as a function.
        reused: how many calls reused one.
        reason: why the blocks were traced each by itself, if they were.
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
    """

    def __init__(self, trace: Trace, module: torch.nn.Module) -> None:
        self.trace = trace
        self.members: dict[int, Member] = {}
        self.records: dict[int, BlockRecord] = {}
        self.known: dict[Any, list[Entry]] = {}
        self.refused: dict[Any, str] = {}
        for family in families(module):
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
        taken = take_apart(self.trace, args, kwargs)
        if taken is None:
            return run(*args, **kwargs)
        given, key = taken
        key = (id(member.family), self._policies(member), *key)
        record = self.records[id(member.family)]
        if key in self.refused:
            return run(*args, **kwargs)
        entry = next((e for e in self.known.get(key, ()) if self._fits(e, member)), None)
        if entry is None:
            try:
                entry = trace_block(self.trace, member, given, run)
            except NotPure as error:
                record.reason = self.refused[key] = f"{member.fqn}: {error}"
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
                record.reason = self.refused[key] = f"{member.fqn}: {type(error).__name__}"
            if entry is None:
                return run(*args, **kwargs)
            record.traced += 1
            self.known.setdefault(key, []).append(entry)
        else:
            record.reused += 1
        return self._emit(entry, member, given)

    def _policies(self, member: Member) -> tuple[str | None, ...]:
        """What the backward pass computes again of a block."""
        names = (self.trace.own_modules.get(id(m)) for m in member.module.modules())
        return tuple(None if name is None else self.trace.remat(name) for name in names)

    def release(self) -> None:
        """Drop what belongs to the trace; the records stay."""
        self.members.clear()
        self.known.clear()
        self.refused.clear()

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
    trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]
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
            kinds.append((*layout, leaf._frozen, leaf._bounds, hasattr(leaf, "_is_param")))
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
    return Arguments(leaves, spec), (spec.key, tuple(kinds), modes)
