"""The casts of one program under a policy: of its state, in and out, and of its results."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tpuport.foundation import pytree
from tpuport.foundation.interop import backend
from tpuport.foundation.pytree.clone import clone_module
from tpuport.tracing.functions import promotion
from tpuport.tracing.state.module_state import state_tree
from tpuport.tracing.state.request import TraceRequest, TraceResult


@dataclass(frozen=True)
class Casting:
    """The dtypes of one program; the default changes nothing.

    Attributes:
        compute: The compute dtype, None without a policy.
        inside: The dtype in the program of each parameter and buffer by name.
        held: The dtype in which each is held between calls.
        outputs: The dtype for results that are in the compute dtype; None leaves them unchanged.
        before: The dtype that the model's parameters had before its first policy.
    """

    compute: torch.dtype | None = None
    inside: Mapping[str, torch.dtype] = field(default_factory=dict)
    held: Mapping[str, torch.dtype] = field(default_factory=dict)
    outputs: torch.dtype | None = None
    before: torch.dtype | None = None

    def around(
        self, trace: Callable[[TraceRequest], TraceResult], request: TraceRequest
    ) -> TraceResult:
        """Trace a call under the policy.

        The state is cast on the way in, and back to the dtypes that it is held in on the way out.
        """
        if self.compute is None:
            return trace(request)
        values = {name: self._entering(name, value) for name, value in request.values.items()}
        with self.in_force():
            outcome = trace(dataclasses.replace(request, values=values))
        for name, value in outcome.state.items():
            given = request.values.get(name)
            if given is not None and name in self.inside and value.dtype != given.dtype:
                outcome.state[name] = value.astype(given.dtype)
        self._restore(outcome)
        return outcome

    def _entering(self, name: str, value: Any) -> Any:
        dtype = self.inside.get(name)
        return value if dtype is None else value.astype(backend.jax_dtype(dtype))

    def in_force(self) -> contextlib.AbstractContextManager[None]:
        """Allow the dtypes of the policy to meet in this thread, inside the block."""
        return (
            contextlib.nullcontext() if self.compute is None else promotion.in_force(self.compute)
        )

    def _restore(self, outcome: TraceResult) -> None:
        if self.outputs is None:
            return
        for index in result_leaves(outcome.out_spec.node):
            meta = outcome.out_metas[index]
            if isinstance(meta, torch.Tensor) and meta.dtype == self.compute:
                value = outcome.out_leaves[index]
                outcome.out_leaves[index] = value.astype(backend.jax_dtype(self.outputs))
                outcome.out_metas[index] = meta.to(self.outputs)
                outcome.out_aliases.pop(index, None)

    def restored(self, result: Any) -> Any:
        """Return eager PyTorch's result in the dtypes that a program returns."""
        if self.outputs is None:
            return result
        leaves, spec = pytree.flatten(result)
        for index in result_leaves(spec.node):
            if leaves[index].dtype == self.compute:
                leaves[index] = leaves[index].to(self.outputs)
        return pytree.unflatten(spec, leaves)

    def held_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that a parameter or buffer is held in; `dtype` is its module's."""
        return self.held.get(name, dtype)


NOT_CAST = Casting()


def result_leaves(node: Any) -> set[int]:
    """Return the leaves of a structure that are results, not inside an object such as a cache."""
    tag, what = node[0], node[1]
    if tag == "leaf":
        return {what}
    is_node = tag == "node" and issubclass(node[2].kind, (list, tuple, dict))
    if is_node or (tag == "node" and dataclasses.is_dataclass(node[2].kind)):
        return {index for part in node[2].all for index in result_leaves(part)}
    return set()


def cast_module(module: torch.nn.Module, dtypes: Mapping[str, torch.dtype]) -> torch.nn.Module:
    """Return a copy of a module with other dtypes for some parameters and buffers, by name."""
    names = {id(leaf): name for name, leaf in state_tree(module).leaves.items()}

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        dtype = dtypes.get(names.get(id(tensor), ""), tensor.dtype)
        if dtype == tensor.dtype:
            return tensor
        made = tensor.detach().to(dtype)
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        vars(made).update(vars(tensor))
        return made

    return clone_module(module, cast)[0]
