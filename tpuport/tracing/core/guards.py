"""Guards on what a traced program read from outside its module.

These are tensors and modules in closures, globals and arguments, and the Python values that the
code reads. Their values are part of the program. A guard notices, at a later call, that one has
changed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import shared_memory
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.storage import parts_of


class PythonValues(Protocol):
    """The Python values that code read from outside (`tracing/guards/global_state.py`)."""

    def changed(self) -> list[str]:
        """Return the names of the values that have changed."""
        ...


def _held(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return the mode of a module, and the identities of its tensors and of its attributes."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    held = tuple((name, id(tensor)) for name, tensor in tensors)
    return (module.training, held, tuple(map(id, module.__dict__.values())))


def _contents(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, with copies of its registries."""
    return {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in module.__dict__.items()
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(a[k] is b[k] for k in a)
    return a is b


def _was_lent(before: Any, now: Any, is_foreign: Callable[[Any], bool]) -> bool:
    """Return whether a module had tensors of the call while it was called, and has its own again.

    So `torch.func.functional_call` and torchrl's losses call a module with parameters of another.
    """
    lent, own = (_tensors_of(part) for part in (before, now))
    return bool(lent) and not any(map(is_foreign, lent)) and all(map(is_foreign, own))


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """Return an attribute's tensors: itself, or those of a registry."""
    parts = value.values() if isinstance(value, dict) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor)]


# Larger memory is compared only where somebody asked torch for it, to write there perhaps.
_MOST_BYTES = 1 << 16


class NotedTensor:
    """A tensor from outside, with what it held when it was read.

    A write is noticed in whatever way it was made. torch counts none by numpy, DLPack or `.data`,
    so that small memory is compared, and large memory is shared with a lazy clone until torch gives
    it away. Large memory that others know the address of is not compared.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._note()

    def _note(self) -> None:
        self._state = _state_of(self.tensor)
        self._memory = _memory_of(self.tensor)
        self._held = self._memory.tobytes()
        self._shape = _shape_of(self.tensor)
        self._clone: torch.Tensor | None = None

    def share(self) -> None:
        """Share large memory with a clone, which is not possible while an operation runs on it."""
        if self._memory.size or self._clone is not None or not self.tensor.numel():
            return
        if shared_memory.is_private(self.tensor):
            self._clone = shared_memory.try_lazy_clone(self.tensor)

    def is_written(self) -> bool:
        """Return whether the tensor holds something else now."""
        if _state_of(self.tensor) == self._state and self._memory.tobytes() == self._held:
            return False
        if _shape_of(self.tensor) != self._shape or not (self._memory.size or self._is_cloned()):
            return True
        if _memory_of(self.tensor).tobytes() != self._held:
            return True
        self._note()
        self.share()
        return False

    def _is_cloned(self) -> bool:
        """Return whether there is a clone, which holds what the tensor holds."""
        clone = self._clone
        if clone is None or clone.shape != self.tensor.shape:
            return False
        ours, theirs = (
            one.detach().reshape(-1).contiguous().view(torch.uint8) for one in (self.tensor, clone)
        )
        return torch.equal(ours, theirs)


def _shape_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction():
        tensor = parts_of(tensor)[-1]
        if tensor.layout is not torch.strided:
            return (tensor.shape, tensor.dtype)
        return (tensor.shape, tensor.dtype, tensor.stride(), tensor.storage_offset())


def _state_of(tensor: torch.Tensor) -> tuple[int | None, int]:
    """Return what a write to a tensor changes, or an assignment to its `.data`."""
    with torch._C.DisableTorchFunction():
        values = parts_of(tensor)[-1]
    if tensor.is_inference():
        return None, shared_memory.address(values)
    version = tensor._version + (0 if values is tensor else values._version)
    return version, shared_memory.address(values)


def _memory_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a tensor, if it is small enough to compare at each call."""
    with torch._C.DisableTorchFunction():
        tensor = parts_of(tensor)[-1]
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            return np.empty(0, np.uint8)
        if tensor.untyped_storage().nbytes() > _MOST_BYTES:
            return np.empty(0, np.uint8)
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def lost_gradient(tensor: torch.Tensor) -> PortError:
    """Return the refusal of a tensor whose gradient only autograd would have."""
    return port_error(
        f"a tensor of shape {tuple(tensor.shape)} that requires a gradient is no parameter of the"
        " ported module (such as one of a module in a plain list): its gradient would be lost",
        code="TPU406",
        remedy="register it (nn.ModuleList, register_parameter), stop its gradient"
        " (requires_grad_(False), no_grad, detach), or leave the class to eager PyTorch:"
        " porting(eager=(...)), or --eager",
    )


@dataclass
class HostRead:
    """A read of the host's state (a file, the working directory), which later calls repeat.

    Attributes:
        name: words for it.
        again: reads it again.
        value: what it gave.
    """

    name: str
    again: Callable[[], Any]
    value: Any


@dataclass
class Guards:
    """The guards of one program: collected by its trace, checked before each later call.

    Attributes:
        tensors: host tensors from outside by id, with what they were when they were read.
        modules: modules from outside by id, with what they held.
        python: the Python values that the code read.
        reads: what the code read of the host's state, by what was asked.
        moments: the lines that read a clock, or random numbers of the system: their values are of
            one call alone, and no guard can compare them.
    """

    tensors: dict[int, NotedTensor] = field(default_factory=dict)
    modules: dict[int, tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=dict
    )

    python: PythonValues | None = None
    reads: dict[Any, HostRead] = field(default_factory=dict)
    moments: list[str] = field(default_factory=list)
    _views: dict[int, torch.Tensor] = field(default_factory=dict)

    def note_views(self, made: Any) -> None:
        """Note views that the trace made: what they are of has been noted."""
        for one in made if isinstance(made, (list, tuple)) else (made,):
            self._views[id(one)] = one

    def note_tensor(self, tensor: torch.Tensor) -> None:
        """Note that a host tensor from outside is read."""
        if id(tensor) not in self.tensors and id(tensor) not in self._views:
            self.tensors[id(tensor)] = NotedTensor(tensor)

    def share(self) -> None:
        """Let a write to large memory be seen from now on, when the trace has ended."""
        self._views.clear()
        for noted in self.tensors.values():
            noted.share()

    def note_module(self, module: torch.nn.Module) -> None:
        """Note that a module from outside is called."""
        if id(module) not in self.modules:
            self.modules[id(module)] = (module, _held(module), _contents(module))

    def restore(self, is_foreign: Callable[[Any], bool]) -> list[str]:
        """Restore the attributes of modules from outside; return the names of the changed ones.

        Args:
            is_foreign: Says whether a tensor was there before the trace.
        """
        changed: list[str] = []
        for key, (module, _, before) in list(self.modules.items()):
            now = _contents(module)
            for name in [n for n in {**before, **now} if not _same(before.get(n), now.get(n))]:
                if _was_lent(before.get(name), now.get(name), is_foreign):
                    self.modules[key] = (module, _held(module), _contents(module))
                    continue
                changed.append(f"{type(module).__name__}.{name}")
                if name not in before:
                    del module.__dict__[name]
                elif isinstance(before[name], dict) and isinstance(module.__dict__[name], dict):
                    module.__dict__[name].clear()
                    module.__dict__[name].update(before[name])
                else:
                    module.__dict__[name] = before[name]
        return changed

    def refuse_writes(self, is_foreign: Callable[[Any], bool]) -> None:
        """Refuse a call that set attributes of a module from outside.

        Args:
            is_foreign: Says whether a tensor was there before the trace.

        Raises:
            PortError: it did: the attribute would be set once, while tracing.
        """
        changed = self.restore(is_foreign)
        if changed:
            raise port_error(
                f"the call sets {', '.join(changed[:3])} of a module that is not part of the ported"
                " one (an argument, a global, or one in a closure)",
                code="TPU406",
                remedy="convert the module that owns it, or make it a submodule of the ported one",
            )

    def changed(self) -> str | None:
        """Say what has changed since it was read, or return None."""
        for noted in self.tensors.values():
            if noted.is_written():
                shape = tuple(noted.tensor.shape)
                return f"a tensor of shape {shape} outside the module was written"
        for module, held, _ in self.modules.values():
            now = _held(module)
            if now != held:
                what = "mode" if now[0] != held[0] else "parameters, buffers or attributes"
                return f"the {what} of a {type(module).__name__} outside the module changed"
        for read in self.reads.values():
            if read.again() != read.value:
                return f"{read.name} changed"
        names = () if self.python is None else self.python.changed()
        return f"{', '.join(n.lstrip('.') for n in names[:3])} changed" if names else None
