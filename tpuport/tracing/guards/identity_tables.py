"""Tables outside of a module that code looks the module's own parts up in, by identity.

A trace runs on copies of modules and tensors, which such a table does not have: code with a default
(`table.get(module, 1.0)`) would get that, without an error.
"""

import weakref
from typing import Any

import torch

from tpuport.foundation import pytree
from tpuport.foundation.pytree.clone import WEAK_DICTS
from tpuport.foundation.user_frames import place_of
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.guards.code_reads import CodeReads
from tpuport.tracing.guards.global_state import read_values

# No count of anything is as large as an address.
_LEAST_ID = 1 << 32
_MOST_KEYS = 4096
_WEAK = (*WEAK_DICTS, weakref.WeakSet)
_TABLES = (dict, set, *_WEAK)


def refuse_identity_tables(module: torch.nn.Module | None, code: CodeReads) -> None:
    """Refuse dicts and sets outside of a module whose keys are its tensors, modules, or ids.

    Args:
        module: The copy that is traced. It has the user's tensors, but modules of its own.
        code: Where the code reads values.

    Raises:
        PortError: The code reads one.
    """
    if module is None:
        return
    for name, value in read_values(code, None):
        keys = _suspect(_keys(value)) if isinstance(value, _TABLES) else []
        if keys and _are_own(keys, module, code):
            raise port_error(
                f"{name.lstrip('.')} is a table outside of the module that has tensors or modules"
                " of it, or their ids, as keys; a trace has copies of them",
                code="TPU406",
                remedy="use the name of the module or tensor as the key, or keep the table as an"
                " attribute of the module; under porting(), leave the class to eager PyTorch:"
                " --eager NAME",
                place=place_of(type(module).forward),
            )


def _keys(table: Any) -> list[Any]:
    """Return the keys of a dict, also of a weak one, and the members of a set."""
    held = vars(table).get("data") if isinstance(table, _WEAK) else table
    if not isinstance(held, (dict, set)) or len(held) > _MOST_KEYS:
        return []
    base: Any = pytree.dict_class(held) if isinstance(held, dict) else set
    return [k() if isinstance(k, weakref.ref) else k for k in base.__iter__(held)]


def _suspect(keys: list[Any]) -> list[Any]:
    """Return those of some keys, and of their parts, that may be known by identity."""
    found: list[Any] = []
    for key in keys:
        if isinstance(key, tuple):
            found += _suspect(list(key))
        elif isinstance(key, (torch.Tensor, torch.nn.Module)):
            found.append(key)
        elif type(key) is int and key >= _LEAST_ID:
            found.append(key)
    return found


def _are_own(keys: list[Any], module: torch.nn.Module, code: CodeReads) -> bool:
    """Return whether one of some keys is, or may be, a tensor or part of a module, or its id."""
    kinds = {type(one) for one in module.modules()}
    tensors = {id(one) for one in (*module.parameters(), *module.buffers())}
    for one in module.modules():
        tensors |= {id(held) for held in vars(one).values() if isinstance(held, torch.Tensor)}
    for key in keys:
        if isinstance(key, int):
            # The ids of modules are those of the user's, which are not at hand here.
            if key in tensors or code.reads("id"):
                return True
        elif (id(key) in tensors) if isinstance(key, torch.Tensor) else (type(key) in kinds):
            return True
    return False
