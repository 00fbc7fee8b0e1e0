"""Gradients of outputs that a program computes other outputs from.

In torch's graph all outputs of a program come from one node, so none leads to another one. A script
can ask for the gradient of such an output all the same: by `retain_grad`, by a hook, or by
`torch.autograd.grad(loss, output)`. The node gives it, by its taps, when it runs backward.
"""

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Function
from torch.utils.hooks import RemovableHandle

from tpuport.compat.emulated.batched_gradients import row_by_row
from tpuport.foundation.errors import PortError

Gradients = Sequence[torch.Tensor | None]


@dataclass
class _Asked:
    """What a script wants of the gradient of one output.

    Attributes:
        hooks: functions of the gradient, which may return another one.
        retaining: the tensors that keep it, each with its number among the floating outputs.
        catchers: lists that get it.
    """

    hooks: OrderedDict[int, Callable[[torch.Tensor], Any]] = field(default_factory=OrderedDict)
    retaining: list[tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=list)
    catchers: list[list[torch.Tensor]] = field(default_factory=list)

    def hand_on(self, gradient: torch.Tensor, outside: Gradients) -> torch.Tensor:
        """Hand a gradient to all who want it, and return it as the hooks have changed it.

        Args:
            gradient: the whole gradient of the output.
            outside: what flows into each floating output from outside of the program, which torch
                has added to the tensors that keep it already.
        """
        for hook in list(self.hooks.values()):
            made = hook(gradient)
            gradient = gradient if made is None else made
        for catcher in self.catchers:
            catcher.append(gradient)
        for ref, number in self.retaining:
            tensor, own = ref(), outside[number]
            if tensor is not None:
                rest = gradient if own is None else gradient - own
                tensor.grad = rest if tensor.grad is None else tensor.grad + rest
        return gradient


class InnerOutputs:
    """The outputs of a call that others are computed from, and what scripts want of them.

    Attributes:
        outputs: their numbers among the floating outputs, as the program makes them.
        unsure: the numbers of outputs of which nobody can tell.
    """

    def __init__(self) -> None:
        self.outputs: tuple[tuple[int, ...], ...] = ()
        self.unsure: tuple[int, ...] = ()
        self._watches: dict[int, _Asked] = {}
        self._probes: list[torch.Tensor] | None = None

    def probes(self) -> list[torch.Tensor]:
        """Return the input of the call's node by which torch can be asked to run it backward."""
        if self._probes is None:
            self._probes = [torch.zeros((), requires_grad=True)] if self.outputs else []
        return self._probes

    def index(self, number: int) -> int | None:
        """Return which of these outputs one is, by its number among the floating outputs.

        Raises:
            PortError: nobody can tell whether it is one.
        """
        if number in self.unsure:
            raise PortError(
                "a script asks for the gradient of a result that is a copy or a view of all of"
                " another tensor, or that a loop, a branch on data or a checkpointed region makes"
                " together with others",
                code="TPU403",
                remedy="ask for it inside of the module (register_hook, torch.autograd.grad), or"
                " leave the class to eager PyTorch: porting(eager=(...)), or --eager",
            )
        return next((i for i, those in enumerate(self.outputs) if number in those), None)

    def watch(self, index: int) -> _Asked:
        """Return what scripts want of one of these outputs."""
        return self._watches.setdefault(index, _Asked())

    def asked(self) -> tuple[int, ...]:
        """Return the outputs of which a script wants the gradient."""
        wanted = (i for i, w in self._watches.items() if w.hooks or w.retaining or w.catchers)
        return tuple(sorted(wanted))

    def pulled(
        self,
        asked: tuple[int, ...],
        pull: Callable[[Gradients], Gradients],
        gradients: Gradients,
        leads: Callable[[int, int], bool],
    ) -> list[torch.Tensor | None]:
        """Run backward, hand the gradients of outputs on, and return those of the inputs.

        Args:
            asked: the outputs whose gradients are handed on.
            pull: maps the gradients of all outputs to those of the inputs and of these outputs.
            gradients: the gradients of all outputs.
            leads: says whether an output (by its number) is computed from one of `outputs`.
        """
        given, found = list(gradients), list(row_by_row(pull, gradients))
        count = len(found) - len(asked)
        ends = [index for index in asked if self._watches[index].catchers]
        # A hook sees the gradient that hooks of later outputs have changed.
        for place in reversed(range(len(asked))):
            gradient, index = found[count + place], asked[place]
            number = self.outputs[index][0]
            # torch.autograd.grad runs the hooks on the way to what it asks for.
            on_way = not ends or index in ends or any(leads(number, end) for end in ends)
            if gradient is None or not on_way:
                continue
            seen = self._watches[index].hand_on(gradient, gradients)
            if seen is not gradient:
                changed, before = seen - gradient, given[number]
                given[number] = changed if before is None else before + changed
                found = list(row_by_row(pull, given))
        return found[:count]


def inner_output(tensor: Any, function: type[Function]) -> tuple[InnerOutputs, int] | None:
    """Return what an output belongs to and which one it is, if others are computed from it.

    Args:
        tensor: anything.
        function: the function whose nodes in torch's graph are calls of programs.
    """
    if not isinstance(tensor, torch.Tensor):
        return None
    node: Any = tensor.grad_fn
    if not isinstance(node, function._backward_cls):  # type: ignore[attr-defined]
        return None
    try:
        call, _ = node.saved_tensors[0]._tpuport_kept
    except RuntimeError:
        return None  # a backward pass has freed it, and torch says so
    index = call.inner.index(tensor.output_nr)
    return None if index is None else (call.inner, index)


def retain_gradient(tensor: torch.Tensor, function: type[Function]) -> None:
    """Let an output keep its gradient, as `retain_grad` does."""
    with torch._C.DisableTorchFunction():
        tensor.retain_grad()
    place = inner_output(tensor, function)
    if place is not None:
        inner, index = place
        retaining = inner.watch(index).retaining
        if all(ref() is not tensor for ref, _ in retaining):
            retaining.append((weakref.ref(tensor), tensor.output_nr))


def add_hook(inner: InnerOutputs, index: int, hook: Any) -> RemovableHandle:
    """Call a function with the gradient of an output, and return what ends that."""
    hooks = inner.watch(index).hooks
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


@contextlib.contextmanager
def caught(places: Sequence[tuple[InnerOutputs, int]]) -> Iterator[list[list[Any]]]:
    """Catch the gradients of outputs that backward passes in the block reach."""
    lists: list[list[Any]] = [[] for _ in places]
    for (inner, index), found in zip(places, lists, strict=True):
        inner.watch(index).catchers.append(found)
    try:
        yield lists
    finally:
        for (inner, index), found in zip(places, lists, strict=True):
            catchers = inner.watch(index).catchers
            catchers[:] = [one for one in catchers if one is not found]


def graph_reaches(
    tensors: Sequence[torch.Tensor], ends: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Return the first of some tensors to which a graph of others leads, if any."""
    leaves = {id(end): end for end in ends if end.grad_fn is None}
    nodes = {end.grad_fn: end for end in ends if end.grad_fn is not None}
    seen: set[Any] = set()
    pending: list[Any] = [tensor.grad_fn for tensor in tensors]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found = nodes.get(node, leaves.get(id(getattr(node, "variable", None))))
        if found is not None:
            return found
        pending += (following for following, _ in node.next_functions)
    return None
