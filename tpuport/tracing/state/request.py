"""One call to trace, and the outcome of its trace."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation import pytree
from tpuport.foundation.interop import backend, device_mark
from tpuport.source.rewrite import live
from tpuport.tracing.core.arguments import Changes
from tpuport.tracing.core.context import Trace
from tpuport.tracing.state.lengths import Lengths
from tpuport.tracing.state.module_state import PythonChanges


@dataclass
class NewLeaf:
    """A tensor that a call makes a leaf that requires grad, and that a script can see after it.

    Attributes:
        name: The name of its value in the program.
        meta: A meta tensor like it.
        is_parameter: Whether it is an `nn.Parameter`.
        argument: The index of the argument that it is, or None.
        results: The results that it is, by index.
        state: The names in the state that the call bound to it.
    """

    name: str
    meta: torch.Tensor
    is_parameter: bool
    argument: int | None = None
    results: list[int] = field(default_factory=list)
    state: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Flows:
    """The state through which gradients flow on after a call, and what the results depend on.

    Attributes:
        state: The names that the call bound to new floating tensors that require grad.
        used: The differentiated inputs that a result or this state depends on, one bit for each.
        leaves: The leaves that the call made, each with the numbers of the floating outputs that
            it is.
        inner: The floating outputs that others are computed from, by number, as the program makes
            them. Those that are one value are together.
        unsure: The floating outputs of which nobody can tell whether others are computed from them.
        arguments: The arguments, by index, that the call gave a value with a gradient.
        sparse: The differentiated inputs, by number, whose gradient is sparse, each with its
            number of lookups.
    """

    state: tuple[str, ...]
    used: int
    leaves: "tuple[tuple[NewLeaf, tuple[int, ...]], ...]" = ()
    inner: tuple[tuple[int, ...], ...] = ()
    unsure: tuple[int, ...] = ()
    arguments: tuple[int, ...] = ()
    sparse: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Written:
    """An argument that the call wrote to, by index."""

    index: int


@dataclass
class TraceResult:
    """The outcome of one trace of a program. Arrays are tracers of the enclosing jax trace."""

    out_leaves: list[Any]
    out_spec: pytree.TreeSpec
    out_metas: list[Any]
    state: dict[str, jax.Array]
    mutated: dict[int, jax.Array]
    error_code: jax.Array | None
    trace: Trace
    rewrites: list[live.LiveRewrite]
    python_changes: PythonChanges | None = None
    uses_key: bool = False
    baked: dict[str, Any] = field(default_factory=dict)
    argument_changes: Changes | None = None
    put_leaves: list[Any] = field(default_factory=list)
    put_metas: list[Any] = field(default_factory=list)
    host_paths: list[str] = field(default_factory=list)
    # By output index (those put into arguments follow): outputs that share memory with others.
    out_aliases: "dict[int, Alias]" = field(default_factory=dict)
    # State that the call changes, by name.
    changed: frozenset[str] = frozenset()
    # The arguments of which the code asked where they begin in memory.
    placed: list[int] = field(default_factory=list)
    # State that is in other memory after the call, by name: whether the old memory was written to.
    rebound: dict[str, bool] = field(default_factory=dict)
    # A meta tensor like each changed tensor of the state, by name.
    state_metas: dict[str, torch.Tensor] = field(default_factory=dict)
    # The names that the call bound to another tensor: `self.x = ...`, not `self.x.add_(1)`.
    bound: frozenset[str] = frozenset()
    # The names of other tensors, no leaves, that the call wrote to, and that have a graph.
    computed: frozenset[str] = frozenset()
    # The arguments of `mutated` that are no leaves and have a graph.
    written: frozenset[int] = frozenset()
    # What those tensors share memory with, by name: arguments, state before the call, one another.
    state_aliases: "dict[str, Alias]" = field(default_factory=dict)
    # The outputs, by index, that are also bound to a name of the state, and that name.
    returned: dict[int, str] = field(default_factory=dict)
    # The state that code inside asked torch.autograd for a gradient of, by name, and where.
    inner_starts: dict[str, str] = field(default_factory=dict)
    # The leaves that the call made and that a script can see.
    new_leaves: list[NewLeaf] = field(default_factory=list)
    # The results (by index) and the state (by name) that code inside asked to retain a gradient.
    retained: list[int | str] = field(default_factory=list)
    # Those results and that state whose value is that of another tensor, as a clone's is.
    repeated: list[int | str] = field(default_factory=list)
    # Where gradients flow on, if the call is differentiated.
    flows: Flows | None = None

    @property
    def code(self) -> jax.Array:
        """Return the number of the first lifted check that failed, 0 for none."""
        return jnp.zeros((), jnp.int32) if self.error_code is None else self.error_code


@dataclass(frozen=True)
class Sibling:
    """Another output of the call, by index."""

    index: int


@dataclass(frozen=True)
class Before:
    """The tensor that the state had under a name before the call."""

    name: str


@dataclass(frozen=True)
class Outside:
    """A tensor that is neither an argument nor state: a global, a plain attribute."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Alias:
    """A description of the memory that an output or state shares, and of its part in it.

    Attributes:
        of: An argument by index, state after the call by name, state before it, another output, or
            a tensor from outside.
        is_same: Whether the output is that tensor.
        size: Its sizes.
        stride: Its strides in that memory.
        offset: Where it starts, counted from where the other one starts.
        is_exact: Whether it is such a window into the other one, with the same dtype.
        byte: Where it starts, counted in bytes.
        is_noted: Whether it is the conjugate of what is there, or negated.
        is_written: Of state, whether the call wrote to that memory.
        is_cut: Whether it requires grad and passes none on: a view that was taken under no_grad.
    """

    of: int | str | Before | Sibling | Outside
    is_same: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_exact: bool = True
    is_written: bool = False
    is_cut: bool = False
    byte: int = 0
    is_noted: bool = False


@dataclass
class TraceRequest:
    """One call to trace.

    Attributes:
        method: Name of the module's method ("forward" goes through `__call__`, hooks included).
        values: State by name.
        key: Base key of the program's randomness, or None if it may not draw any.
        leaves: Argument arrays (a key array for a `torch.Generator`).
        metas: For each leaf a meta tensor, or the class of a generator.
        spec: The arguments' structure.
        hoist: For a host constant, returns an array to use instead of embedding it, or None.
        checks: Whether to collect the conditions of lifted checks.
        known: State whose concrete value may be read if the trace needs it.
        known_leaves: Concrete values of arguments, for the same use.
        on_module: Called with the copy of the module that is traced, before the call.
        wide: Whether results keep their 64 bits, because the caller takes them out of jax. If not,
            they have the dtypes that other jax code expects.
        lengths: The arguments that are longer at each call; their count is the last leaf.
        draws: Whether the program may have arguments that are drawn on the host before each call.
    """

    method: str
    values: dict[str, Any]
    key: jax.Array | None
    leaves: list[Any]
    metas: list[Any]
    spec: pytree.TreeSpec
    hoist: Callable[[torch.Tensor], jax.Array | None] | None = None
    checks: bool = True
    known: dict[str, Any] = field(default_factory=dict)
    known_leaves: dict[int, Any] = field(default_factory=dict)
    on_module: Callable[[Any], None] | None = None
    wide: bool = False
    lengths: Lengths | None = None
    draws: bool = False

    @property
    def candidates(self) -> list[int]:
        """Return the arguments whose value may be read while tracing.

        These are small and of integer or boolean dtype, the smallest first.
        """
        growing: set[int] = set()
        if self.lengths is not None:
            growing = self.lengths.leaves | {len(self.leaves) - 1}
        found = [
            (meta.numel(), index)
            for index, meta in enumerate(self.metas)
            if index in self.known_leaves and _is_small_argument(meta) and index not in growing
        ]
        return [index for _, index in sorted(found)]

    def host_leaf(self, index: int) -> torch.Tensor:
        """Return the argument as a plain CPU tensor, which code sees where the caller had it."""
        made = backend.to_torch(self.known_leaves[index], self.metas[index].dtype)
        return device_mark.tag(made) if device_mark.is_tagged(self.metas[index]) else made


_ARGUMENT_LIMIT = 1 << 16


def _is_small_argument(meta: Any) -> bool:
    if not isinstance(meta, torch.Tensor):
        return False
    whole = not meta.dtype.is_floating_point and not meta.dtype.is_complex
    return whole and meta.numel() <= _ARGUMENT_LIMIT
