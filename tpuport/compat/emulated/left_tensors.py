"""The tensors that one call leaves in the user's module, with what they share memory with."""

from collections.abc import Mapping
from typing import Any

import jax
import torch

from tpuport.compat.emulated.gradients import host_tensor
from tpuport.compat.emulated.other_views import other_view, share_overlapping
from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import backend
from tpuport.foundation.interop.device_mark import is_tagged, tag
from tpuport.model.parity.verify import Reference
from tpuport.tracing.core.arguments import flatten_call
from tpuport.tracing.state.module_state import StateTree, state_tree
from tpuport.tracing.state.request import Alias, Before, Outside, Sibling, TraceResult


class LeftTensors:
    """The tensors that a call bound anew, each made when it is asked for first.

    Attributes:
        bound: their names.
        computed: the names of other tensors, no leaves, that the call wrote to.
        flowing: those with a graph, by name.
        leaves: those that the call made leaves that require grad, by name.
        written: the arguments, by index, that the call gave a value with a graph.
        shares: whether one is a view of another tensor.
    """

    def __init__(self) -> None:
        self.bound: set[str] = set()
        self.computed: set[str] = set()
        self.shares = False
        self.flowing: dict[str, torch.Tensor] = {}
        self.leaves: dict[str, torch.Tensor] = {}
        self.written: tuple[int, ...] = ()
        # What the tensors of changed state are like, and their values.
        self._metas: dict[str, torch.Tensor] = {}
        self._values: Mapping[str, jax.Array] = {}
        # What they share memory with, and the user's tensor for it if it was there before the call.
        self._owners: dict[str, tuple[Alias, Any]] = {}
        self._made: dict[str, torch.Tensor] = {}
        # The memory of this call's constants, by that of the trace's.
        self._constants: dict[int, torch.UntypedStorage] = {}
        self._of_constants: set[str] = set()

    def note(self, outcome: TraceResult, values: Mapping[str, jax.Array]) -> None:
        """Add what a program did; `values` is the state after it."""
        self.bound.update(outcome.bound)
        self.computed.update(outcome.computed)
        self._metas.update(outcome.state_metas)
        self._values = values

    def share(
        self,
        outcome: TraceResult,
        before: Mapping[str, Any],
        arguments: list[Any],
        results: list[Any],
    ) -> None:
        """Find what the tensors and the results share, and put those for results that they are.

        Args:
            outcome: the outcome of the program.
            before: the user's tensors before the call, by name.
            arguments: the leaves of its arguments.
            results: its results, which are changed.
        """
        _share_siblings(outcome, results)
        for name, alias in outcome.state_aliases.items():
            of = alias.of
            is_result = isinstance(of, Sibling)
            owner = results[of.index] if is_result else owner_of(alias, before, arguments)
            self._owners[name] = alias, owner
        for index, name in outcome.returned.items():
            if name in outcome.state_metas:
                results[index] = self.tensor(name, results[index])
            elif isinstance(of := outcome.out_aliases[index].of, Outside):
                results[index] = of.tensor
            else:
                results[index] = self._made.setdefault(name, results[index])

    def refuse_lost_parameters(self, tree: StateTree) -> None:
        """Refuse a call that leaves a computed tensor in the place of a parameter.

        Raises:
            PortError: it does. The parameter is a leaf, which nothing computed can be written to.
        """
        for name in self.flowing:
            if isinstance(tree.leaves.get(name), torch.nn.Parameter):
                raise PortError(
                    f"the call puts a tensor that it computed in place of the parameter {name!r}",
                    code="TPU406",
                    remedy="put the parameter back before forward returns, or pass the tensors by"
                    " torch.func.functional_call; or leave this class to eager PyTorch:"
                    " porting(eager=(...)), or --eager",
                )

    def has(self, name: str) -> bool:
        """Return whether the call left a new tensor of the program under a name."""
        return name in self._made or (name in self.bound and name in self._metas)

    def is_old(self, name: str) -> bool:
        """Return whether a name was bound to a host tensor from before the call, or a view of one
        that the call left under another name.
        """
        alias, _ = self._owners.get(name, (None, None))
        if alias is None:
            return False
        is_known = isinstance(alias.of, (Outside, Before)) and alias.is_same
        return is_known or (isinstance(alias.of, str) and self.has(name))

    def constant(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return this call's own tensor for a constant that it left under a name."""
        if name in self._made:
            return self._made[name]
        if value.layout is not torch.strided:
            return value.clone()
        self._of_constants.add(name)
        with torch._C.DisableTorchFunction():
            memory = value.untyped_storage()
            own: Any = self._constants.setdefault(memory._cdata, memory.clone())
            made = torch.empty(0, dtype=value.dtype)
            made.set_(own, value.storage_offset(), value.size(), value.stride())
            return tag(made) if is_tagged(value) else made

    def leaf(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return the leaf that the call left under a name, for the tensor of the ported copy."""
        if value.device.type != "meta":  # a constant, which no program returns
            self.leaves[name].data.copy_(value)
        return self.leaves[name]

    def tensor(self, name: str, result: torch.Tensor | None = None) -> torch.Tensor:
        """Return the tensor that the call left under a name: a known one, a view, or a new one.

        `result` is a new one that the call returns as well.
        """
        if name not in self._made:
            made = self._known(name)
            if name in self.leaves:
                leaf = self.leaves[name]
                made = leaf if made is None else in_memory_of(made, leaf)
            if made is None:
                made = self.flowing.get(name) if result is None else result
            if made is None:
                meta = self._metas[name]
                made = host_tensor(self._values[name], meta.dtype, meta)
            self._made[name] = made
        return self._made[name]

    def share_buffers(
        self, out: Any, results: list[tuple[torch.Tensor, Alias]], tree: StateTree
    ) -> Any:
        """Let results share the memory of the user's own state, which has its new values.

        Args:
            out: what the call returns.
            results: the results in it that share memory, each with the part of a tensor that it is.
            tree: the user's tensors after the call.

        Returns:
            `out`, with tensors of the user's and views of them in place of results that have their
            graph.
        """
        with_graph: dict[int, torch.Tensor] = {}
        for result, alias in results:
            is_computed = alias.of in self.computed
            is_own = alias.of in tree.registered or alias.of in self._metas
            is_own |= alias.of in self._of_constants
            owner = tree.leaves.get(str(alias.of)) if is_own else None
            if not isinstance(owner, torch.Tensor) or not (alias.is_same or alias.is_exact):
                continue
            if is_computed and result.requires_grad:
                made = owner if alias.is_same else view_of(owner, alias, requires_grad=True)
                with_graph[id(result)] = made
            elif not (owner.requires_grad or result.requires_grad):
                offset = owner.storage_offset() + alias.offset
                with torch._C.DisableTorchFunction():
                    result.set_(owner.untyped_storage(), offset, alias.size, alias.stride)
        if not with_graph:
            return out
        leaves, spec = pytree.flatten(out)
        return pytree.unflatten(spec, [with_graph.get(id(leaf), leaf) for leaf in leaves])

    def of_eager(self, found: Reference) -> list[torch.Tensor]:
        """Return the tensors of eager's module and its arguments that the call left with a graph,
        in one order.
        """
        left = {} if found.module is None else state_tree(found.module).leaves
        given = flatten_call(found.given)[0]
        named = [left.get(name, torch.zeros(())) for name in self.flowing]
        return [*named, *(given[index] for index in self.written)]

    def _known(self, name: str) -> torch.Tensor | None:
        """Return what a name was bound to if a tensor for it exists: that one, or a view of it."""
        alias, owner = self._owners.get(name, (None, None))
        if alias is not None and isinstance(alias.of, str):
            owner = self.tensor(alias.of)
        if alias is None or not isinstance(owner, torch.Tensor):
            return None
        if alias.is_same and alias.is_written:
            with torch.no_grad():
                owner.copy_(backend.to_torch(self._values[name], owner.dtype))
        if alias.is_same:
            return owner
        if alias.is_written or not alias.is_exact:
            return None
        self.shares = True
        return view_of(owner, alias, self._metas[name].requires_grad)


def view_of(owner: torch.Tensor, alias: Alias, requires_grad: bool = False) -> torch.Tensor:
    """Return a window into the memory of a tensor.

    Args:
        owner: the tensor.
        alias: the window.
        requires_grad: whether it requires grad, as a view of what does, else it is detached.
    """
    offset = owner.storage_offset() + alias.offset
    with torch._C.DisableTorchFunction():
        base = owner if requires_grad and not alias.is_cut else owner.detach()
        view = base.as_strided(alias.size, alias.stride, offset)
        # A view that was taken under no_grad would raise in code of ours that asks for its graph,
        # once its base was written to: this is a leaf of its own, as eager's is.
        return tag(view.requires_grad_() if requires_grad and alias.is_cut else view)


def _share_siblings(outcome: TraceResult, results: list[Any]) -> None:
    """Put views of results for the results that are views of these: writes are seen on both."""
    for index, alias in outcome.out_aliases.items():
        if not isinstance(alias.of, Sibling):
            continue
        owner, result = results[alias.of.index], results[index]
        if not (isinstance(owner, torch.Tensor) and isinstance(result, torch.Tensor)):
            continue
        if alias.is_same:
            results[index] = owner
        elif not alias.is_exact:
            is_whole = alias.of.index not in outcome.out_aliases
            made = other_view(owner, alias, result) if is_whole else None
            results[index] = result if made is None else made
        elif owner.requires_grad or not result.requires_grad:
            made = view_of(owner, alias, result.requires_grad)
            results[index] = in_memory_of(made, result)
    share_overlapping(outcome.out_aliases, results)


def in_memory_of(view: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return a view; instead of it a leaf that the call made, in its memory, if a result is one."""
    if not (result.requires_grad and result.is_leaf):
        return view
    result.data = view.detach()
    return result


def part_of(
    owner: torch.Tensor, alias: Alias, result: torch.Tensor, meta: torch.Tensor
) -> torch.Tensor:
    """Return a result as a part of the memory of a tensor of the user's, or itself.

    Args:
        owner: the tensor.
        alias: the part.
        result: the result.
        meta: what it is like.
    """
    if alias.is_exact or (isinstance(alias.of, Outside) and meta.dtype == owner.dtype):
        return in_memory_of(view_of(owner, alias, meta.requires_grad), result)
    other = None if meta.dtype == owner.dtype else other_view(owner, alias, result)
    return result if other is None else other


def owner_of(alias: Alias, before: Mapping[str, Any], arguments: list[Any]) -> Any:
    """Return the user's tensor that was there before the call, if an alias is of one."""
    if isinstance(alias.of, Before):
        return before.get(alias.of.name)
    return arguments[alias.of] if isinstance(alias.of, int) else getattr(alias.of, "tensor", None)
