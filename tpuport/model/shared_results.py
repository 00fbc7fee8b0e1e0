"""Results of a call that share memory with something else, as in eager PyTorch.

A program returns new arrays. A result that is an argument, state, a view of these or of another
result reads and writes their memory all the same: the storage of its tensor stands for that memory.
Where that is not possible, it is a copy that refuses to be written, or to be read when it is old.
"""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import torch

from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import backend
from tpuport.model.program_cache import CachedProgram
from tpuport.tracing.core import int64
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.storage import SERIALS, Flow, Storage
from tpuport.tracing.core.tensor import TracedTensor, version
from tpuport.tracing.dispatch.view_ops import as_strided
from tpuport.tracing.scan_layers import stacked_params
from tpuport.tracing.state.request import Alias, Before, Outside, Sibling

if TYPE_CHECKING:
    from tpuport.model.ported_state import PortedState


class _Memory(Storage):
    """The memory of something else, which is asked for changes at each use."""

    def __init__(self, value: jax.Array) -> None:
        self._known, self._changes = value, 0
        self.flow, self.stride, self.trace, self.narrow = Flow.STOPPED, None, None, None
        self.serial, self.bounds = next(SERIALS), None

    def _read(self) -> jax.Array:
        """Return the value; the array that is known already if it has not changed."""
        raise NotImplementedError

    @property
    def version(self) -> int:  # type: ignore[override]  (a slot of every other storage)
        """Return how many changes were seen."""
        value = self._read()
        if value is not self._known:
            self._known, self._changes = value, self._changes + 1
        return self._changes

    @property
    def held(self) -> jax.Array:  # type: ignore[override]  (a slot of every other storage)
        """Return the value that the memory has now."""
        self._known = value = self._read()
        return value

    @property
    def wide(self) -> bool:  # type: ignore[override]  (a slot of every other storage)
        """Return whether the value has 64 bits."""
        return int64.is_wide(self._known)


class _TensorMemory(_Memory):
    """The memory of a torch tensor, which counts its writes."""

    def __init__(self, value: jax.Array, tensor: torch.Tensor, what: str) -> None:
        super().__init__(value)
        self._tensor, self._writes, self._what = tensor, version(tensor), what

    def _read(self) -> jax.Array:
        if version(self._tensor) == self._writes and not self._tensor.is_inference():
            return self._known
        self._writes = version(self._tensor)
        with jax.ensure_compile_time_eval():
            return int64.of_host(self._tensor.detach())

    def set(self, value: jax.Array) -> None:
        """Write to the tensor."""
        if self._tensor.requires_grad and torch.is_grad_enabled():
            raise _refused(self._what, "which requires grad, cannot be written in place")
        with torch.no_grad():
            self._tensor.copy_(backend.to_torch(value, self._tensor.dtype))
        if not self._tensor.is_inference():
            # Inside an operation's dispatch torch does not count the write.
            torch.autograd.graph.increment_version(self._tensor)
        self._known, self._changes = value, self._changes + 1
        self._writes = version(self._tensor)


class StateMemory(_Memory):
    """The memory of a parameter or buffer of a ported model.

    Args:
        value: the value that it has.
        ported: the model.
        name: the name of the state.
    """

    def __init__(self, value: jax.Array, ported: "PortedState", name: str) -> None:
        super().__init__(value)
        self._ported: PortedState | None = ported
        self._name, self._is_lost = name, False

    def _read(self) -> jax.Array:
        if self._is_lost:
            raise _refused(
                self._name, "was written to and then replaced in one call, so its value is gone"
            )
        return self._known if self._ported is None else _state(self._ported, self._name)

    def set(self, value: jax.Array) -> None:
        """Write to the model's state."""
        self._read()
        value = int64.narrowed(value)
        if self._ported is None:
            self._known = value
        else:
            target = self._ported.params
            (target if self._name in target else self._ported.buffers)[self._name] = value
        self._changes += 1
        self._known = value

    def leave(self, *, is_lost: bool) -> None:
        """Keep the value of now: from here on the name stands for other memory.

        Args:
            is_lost: the value of this memory has changed and is not known.
        """
        self._known, self._ported, self._is_lost = self._read(), None, is_lost


class Copy(_Memory):
    """A copy of memory that cannot be shared: it is not written, nor read when it is old.

    Args:
        value: the value that it has.
        what: a name for the other memory.
        state: tells what the other memory holds, or how often it was written.
    """

    def __init__(self, value: jax.Array, what: str, state: Callable[[], Any]) -> None:
        super().__init__(value)
        self._what, self._state, self._seen = what, state, state()

    def _read(self) -> jax.Array:
        if not self._is_current():
            raise _refused(self._what, "has changed since the call, and the result has not")
        return self._known

    def _is_current(self) -> bool:
        now = self._state()
        return now is self._seen or (isinstance(now, int) and now == self._seen)

    def set(self, value: jax.Array) -> None:
        """Refuse the write.

        Raises:
            PortError: always.
        """
        del value
        raise _refused(self._what, "would not see this write to the result")

    def leave(self) -> None:
        """Keep the value, as the name stands for other memory and nothing was written to this."""
        if self._is_current():
            self._state = lambda: self._seen


def share(
    ported: "PortedState", compiled: CachedProgram, leaves: list[Any], given: list[Any]
) -> None:
    """Give the results of a call the memory that eager's results share.

    Args:
        ported: the model, after the call.
        compiled: the program of the call.
        leaves: the leaves of the call's arguments.
        given: the results, which are changed.
    """
    for index, alias in compiled.outcome.out_aliases.items():
        result, of = given[index], alias.of
        if not isinstance(result, TracedTensor) or isinstance(of, Before):
            continue
        if isinstance(of, Sibling):
            made = _sibling(given[of.index], alias, result, index)
        elif isinstance(of, str):
            made = _of_state(ported, of, alias, result)
        else:
            what = "a tensor from outside of the model"
            if not isinstance(of, Outside):
                what = f"argument {compiled.signature.parts[of][0].lstrip('.')}"
            owner = of.tensor if isinstance(of, Outside) else leaves[of]
            made = _of_tensor(owner, alias, result, what)
        given[index] = made


def leave(ported: "PortedState", rebound: dict[str, bool]) -> None:
    """Part results of earlier calls from state that is in other memory after a call."""
    for name, is_lost in rebound.items():
        memory = ported._memories.pop(name, None)
        if memory is not None:
            memory.leave(is_lost=is_lost)
        if not is_lost:
            for copy in ported._copies.pop(name, ()):
                copy.leave()


def _sibling(base: Any, alias: Alias, result: TracedTensor, index: int) -> TracedTensor:
    if alias.is_same:
        return base
    root = base._storage
    if alias.is_exact and root.stride == _contiguous(root.value.shape):
        return _window(base, alias, result)
    assert isinstance(alias.of, Sibling)
    what = f"result {alias.of.index} of the call, which shares memory with result {index},"
    return _on(Copy(result._held, what, lambda: version(base)), result)


def _of_state(ported: "PortedState", name: str, alias: Alias, result: TracedTensor) -> TracedTensor:
    value = _state(ported, name)
    is_own = name in ported.params or name in ported.buffers
    fits = alias.is_exact or alias.is_same
    if not (is_own and fits) or value.dtype != backend.jax_dtype(result.dtype):
        copy = Copy(result._held, name, lambda: _state(ported, name))
        ported._copies.setdefault(name, weakref.WeakSet()).add(copy)
        return _on(copy, result)
    memory = ported._memories.get(name)
    if memory is None:
        memory = ported._memories[name] = StateMemory(value, ported, name)
    if alias.is_same:
        return _on(memory, result)
    whole = torch.empty(value.shape, dtype=result.dtype, device="meta")
    return _window(TracedTensor(memory, (), whole, value), alias, result)


def _of_tensor(owner: Any, alias: Alias, result: TracedTensor, what: str) -> TracedTensor:
    if isinstance(owner, TracedTensor):
        if alias.is_same:
            return owner
        root = owner._storage
        if alias.is_exact and root.stride == _contiguous(root.value.shape):
            return _window(owner, alias, result)
    elif isinstance(owner, torch.Tensor) and not isinstance(owner, backend.TorchaxTensor):
        if owner.layout is not torch.strided:
            raise port_error(
                f"the call returns {what}, which is sparse, and JAX holds it dense",
                code="TPU106",
                remedy="return it dense (.to_dense()), or read it where it is kept",
            )
        if alias.is_exact and not (owner.is_conj() or owner.is_neg()):
            offset: Any = owner.storage_offset()
            window = owner.as_strided(alias.size, alias.stride, offset + alias.offset)
            return _on(_TensorMemory(result._held, window, what), result)
    else:
        return _on(Copy(result._held, f"{what}, an array of JAX,", lambda: None), result)
    return _on(Copy(result._held, what, lambda: version(owner)), result)


def _window(base: TracedTensor, alias: Alias, result: TracedTensor) -> TracedTensor:
    """Return a result as a view of a tensor."""
    offset: Any = base.storage_offset()
    made = as_strided(base, list(alias.size), list(alias.stride), offset + alias.offset)
    made._keep(result._held)
    made._own_flow = result._own_flow
    return made


def _on(memory: Storage, result: TracedTensor) -> TracedTensor:
    return TracedTensor(memory, (), result, result._held, result._own_flow)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _state(ported: "PortedState", name: str) -> Any:
    """Return the array that holds a parameter or buffer, alone or in a stack; None if none does."""
    for state in (ported.params, ported.buffers):
        if name in state:
            return state[name]
    stacks = (v for n, v in ported._values().items() if name in stacked_params.members_of(n))
    return next(stacks, None)


def _refused(what: str, why: str) -> PortError:
    return port_error(
        f"{what} {why}: in eager PyTorch this result shares its memory",
        code="TPU202",
        remedy=(
            "return a .clone() of it, or take one of the result; under tpuport.porting() results"
            " share memory"
        ),
    )
