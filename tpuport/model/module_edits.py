"""Edits of a ported model's `module` between two calls."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.pytree.clone import parameter_like
from tpuport.tracing.guards.module_changes import differences, frame_of, key_of, named
from tpuport.tracing.state.module_state import StateTree, state_tree

if TYPE_CHECKING:
    from tpuport.model.ported_state import PortedState


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that counts its own writes.

    So what a script does to the weights of the module that was converted is no edit of the copy.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return tensor
    made = tensor.data
    if isinstance(tensor, torch.nn.Parameter):
        made = parameter_like(made, tensor)
    vars(made).update(vars(tensor))
    return made


def _unregistered(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Return the tensors of modules that a module keeps in plain lists, tuples and dicts."""
    for owner in module.modules():
        for name, held in vars(owner).items():
            if name != "_modules" and isinstance(held, (list, tuple, dict)):
                for one in held.values() if isinstance(held, dict) else held:
                    if isinstance(one, torch.nn.Module):
                        yield from (*one.parameters(), *one.buffers())


class ModuleEdits:
    """What a script has changed in the module that `ported.module` gave it.

    Attributes, submodules, hooks and modes count at the next call. So does a weight, unless the
    model has another value for it by now. Watching begins when the module is asked for.

    Args:
        ported: the model, whose module is watched.
    """

    def __init__(self, ported: "PortedState") -> None:
        self.module = ported._module
        values = ported.by_fqn()
        tree = state_tree(self.module, ported._tracer.numbers)
        for name in ported._tracer.numbers & values.keys():
            # A Python number that became state of the program.
            fqn, attribute = tree.owners[name]
            held = vars(self.module.get_submodule(fqn))
            held[attribute] = type(held[attribute])(values[name])
        self._tree, self._frame, self._keys = self._read(ported)
        self._values = {name: values.get(name) for name in self._keys}

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
        if frame == self._frame and keys == self._keys:
            return
        if self.module is not ported._module:
            raise UsageError(
                f"this {type(self.module).__name__} was the model's `module` until a call of the"
                " model changed its Python state; take `ported.module` again before you edit it"
            )
        if frame != self._frame:
            ported._state_changes.update(dict.fromkeys(named(differences(self._tree, tree)), 1))
            ported._new_version()
        state = ported.by_fqn()
        written = [n for n in keys if n in self._keys and keys[n] != self._keys[n]]
        for name in written:
            if state.get(name) is not self._values[name]:
                raise UsageError(
                    f"{name} was written in `ported.module`, and the model has had another value"
                    " for it since that of `ported.module`; set `ported.params` or"
                    " `ported.buffers`, or call `ported.load`"
                )
        new = [name for name in keys if name not in state]
        ported._adopt(self.module, tree.leaves, fresh=[*written, *new])
        self.__init__(ported)
