"""Edits of a ported model's `module` between two calls."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import shared_memory
from tpuport.foundation.pytree.clone import parameter_like
from tpuport.tracing.guards.module_changes import differences, frame_of, key_of, named
from tpuport.tracing.state.module_state import StateTree, state_tree

if TYPE_CHECKING:
    from tpuport.model.ported_state import PortedState


class Copies:
    """Copies tensors. Copies of tensors that share memory share theirs.

    The memory of a large tensor is copied when somebody writes to it.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, with the attributes of the tensor."""
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
        if not plain or tensor.layout is not torch.strided:
            return tensor
        if shared_memory.is_private(tensor):
            made = shared_memory.lazy_clone(tensor)
        else:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = storage.clone()
            copied: Any = self._storages[storage._cdata]
            made = torch.empty(0, dtype=tensor.dtype)
            made.set_(copied, tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            return parameter_like(made, tensor)
        vars(made).update(vars(tensor))
        return made


# The content of a tensor of so many bytes is compared.
_SMALL = 4096


def _kept(leaf: Any) -> torch.Tensor | None:
    """Return the content of a tensor now; it shares a large one's memory until that is written."""
    if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu" or leaf.is_inference():
        return None
    if leaf.layout is not torch.strided or leaf.dtype.itemsize > 8:
        return None
    if leaf.nbytes <= _SMALL:
        return leaf.detach().clone()
    return shared_memory.try_lazy_clone(leaf)


def _is_written(leaf: Any, kept: torch.Tensor | None) -> bool:
    """Return whether a tensor has another content, by whatever way it was written."""
    if kept is None or not isinstance(leaf, torch.Tensor) or leaf.shape != kept.shape:
        return False
    is_lazy = torch._C._is_cow_tensor  # pyright: ignore[reportAttributeAccessIssue]
    if leaf.dtype != kept.dtype or (leaf.nbytes > _SMALL and is_lazy(leaf)):
        return False
    a, b = (one.detach().reshape(-1).contiguous().view(torch.uint8) for one in (leaf, kept))
    return not torch.equal(a, b)


def _unregistered(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Return the tensors of modules that a module keeps in plain lists, tuples and dicts."""
    for owner in module.modules():
        for name, held in vars(owner).items():
            if name != "_modules" and isinstance(held, (list, tuple, dict)):
                for one in held.values() if isinstance(held, dict) else held:
                    if isinstance(one, torch.nn.Module):
                        yield from (*torch.nn.Module.parameters(one), *torch.nn.Module.buffers(one))


class ModuleEdits:
    """What a script has changed in the module that `ported.module` gave it.

    Attributes, submodules, hooks and modes count at the next call. So does a weight, unless the
    model has another value for it by now. Watching begins when the module is asked for, which gets
    the values that the model has.

    Args:
        ported: the model, whose module is watched.
        shown: the values that the module has, by name.
    """

    def __init__(self, ported: "PortedState", shown: Mapping[str, Any]) -> None:
        self.module = ported._module
        values = ported.by_fqn()
        tree = state_tree(self.module, ported._tracer.numbers)
        for name, value in values.items():
            if shown.get(name) is not value:
                _show(tree.leaves.get(name), value)
        for name in ported._tracer.numbers & values.keys():
            # A Python number that became state of the program.
            fqn, attribute = tree.owners[name]
            held = vars(self.module.get_submodule(fqn))
            held[attribute] = type(held[attribute])(values[name])
        self._tree, self._frame, self._keys = self._read(ported)
        self.values = {name: values.get(name) for name in self._keys}
        self._kept = {name: _kept(leaf) for name, leaf in self._tree.leaves.items()}

    def _read(self, ported: "PortedState") -> tuple[StateTree, Any, dict[str, Any]]:
        """Return the module's state, what decides about its program, and a key for each leaf."""
        with torch._C.DisableTorchFunction():
            tree = state_tree(self.module, ported._tracer.numbers, objects=True)
            state = ported.by_fqn()
            every = {name: key_of(leaf) for name, leaf in tree.leaves.items()}
            keys = {n: key for n, key in every.items() if n in tree.registered or n in state}
            # Tensors that no call changes are constants of the program.
            constants = [(n, key) for n, key in every.items() if n not in keys]
            constants += [("", key_of(tensor)) for tensor in _unregistered(self.module)]
        keys |= {n: tree.leaves[n] for n in ported._tracer.numbers if n in tree.leaves}
        return tree, (frame_of(tree, self.module), constants), keys

    def take(self, ported: "PortedState") -> None:
        """Take over what was changed.

        Raises:
            UsageError: a weight was written that has another value in the model by now, or the
                module is no longer the model's.
        """
        tree, frame, keys = self._read(ported)
        filled = {n for n, kept in self._kept.items() if _is_written(tree.leaves.get(n), kept)}
        if frame == self._frame and keys == self._keys and not filled:
            return
        if self.module is not ported._module:
            raise UsageError(
                f"this {type(self.module).__name__} was the model's `module` until a call of the"
                " model changed its Python state; take `ported.module` again before you edit it"
            )
        if frame != self._frame or not filled <= keys.keys():
            ported._state_changes.update(dict.fromkeys(named(differences(self._tree, tree)), 1))
            ported._new_version()
        state = ported.by_fqn()
        known = self._keys
        written = [n for n in keys if n in known and (keys[n] != known[n] or n in filled)]
        for name in written:
            if state.get(name) is not self.values[name]:
                raise UsageError(
                    f"{name} was written in `ported.module`, and the model has had another value"
                    " for it since that of `ported.module`; set `ported.params` or"
                    " `ported.buffers`, or call `ported.load`"
                )
        new = [name for name in keys if name not in state]
        ported._adopt(self.module, tree.leaves, fresh=[*written, *new])
        now = ported.by_fqn()
        self.__init__(ported, {**self.values, **{n: now.get(n) for n in (*written, *new)}})


def _show(leaf: Any, value: Any) -> None:
    """Give a tensor of the module the value that the model has for it."""
    if isinstance(leaf, torch.Tensor) and isinstance(value, jax.Array):
        if leaf.device.type == "cpu" and value.is_fully_addressable and not leaf.is_inference():
            with torch.no_grad():
                leaf.copy_(shared_memory.to_torch(value))
