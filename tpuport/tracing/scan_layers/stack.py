"""Stacks of the values that each round of a loop reads, as one array."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from tpuport.tracing.scan_layers.unstack_p import UNSTACK


def stacked(atoms: list[Any], env: dict[Any, Any], definitions: dict[Any, Any]) -> Any:
    """Return the operands of all rounds as one array with the round as its first dim.

    Operands that are neighbouring parts of one array are not copied.

    Args:
        atoms: The operand of each round.
        env: The values of variables.
        definitions: The equation that computes each variable.
    """
    if all(isinstance(atom, core.Literal) for atom in atoms):
        return jnp.asarray([atom.val for atom in atoms], dtype=atoms[0].aval.dtype)
    part = _one_part(atoms, definitions)
    if part is not None:
        whole, start = part
        if len(atoms) == whole.aval.shape[0]:
            return env[whole]
        return jax.lax.slice_in_dim(env[whole], start, start + len(atoms))
    converted = _one_conversion(atoms, definitions)
    if converted is not None:
        sources, dtype = converted
        return jax.lax.convert_element_type(stacked(sources, env, definitions), dtype)
    values = [a.val if isinstance(a, core.Literal) else env[a] for a in atoms]
    return jnp.stack([jnp.asarray(value, dtype=atoms[0].aval.dtype) for value in values])


def read_for(atoms: list[Any], definitions: dict[Any, Any]) -> list[Any]:
    """Return the variables whose values `stacked` reads."""
    part = _one_part(atoms, definitions)
    if part is not None:
        return [part[0]]
    converted = _one_conversion(atoms, definitions)
    if converted is not None:
        return read_for(converted[0], definitions)
    return [atom for atom in atoms if isinstance(atom, core.Var)]


def copied_bytes(atoms: list[Any], definitions: dict[Any, Any]) -> int:
    """Return the bytes of the array that `stacked` has to make."""
    if all(isinstance(atom, core.Literal) for atom in atoms):
        return 0
    if _one_part(atoms, definitions) is not None:
        return 0
    converted = _one_conversion(atoms, definitions)
    if converted is not None:
        return copied_bytes(converted[0], definitions)
    aval = atoms[0].aval
    # A key dtype has no itemsize.
    return len(atoms) * aval.size * getattr(aval.dtype, "itemsize", 8)


def _one_part(atoms: list[Any], definitions: dict[Any, Any]) -> tuple[Any, int] | None:
    """Return the array whose neighbouring parts the operands are, and the first part's index."""
    parts = [_part(a, definitions) for a in atoms if isinstance(a, core.Var)]
    first = parts[0] if parts else None
    if first is None or len(parts) < len(atoms):
        return None
    whole, start = first
    return first if parts == [(whole, start + i) for i in range(len(atoms))] else None


def _one_conversion(atoms: list[Any], definitions: dict[Any, Any]) -> tuple[list[Any], Any] | None:
    """Return the sources and the dtype of operands that are all conversions to one dtype."""
    equations = [definitions.get(a) if isinstance(a, core.Var) else None for a in atoms]
    names = {None if eqn is None else eqn.primitive.name for eqn in equations}
    if names != {"convert_element_type"}:
        return None
    found = [eqn for eqn in equations if eqn is not None]
    sources, dtypes = [e.invars[0] for e in found], {e.params["new_dtype"] for e in found}
    same = len({(s.aval.shape, s.aval.dtype) for s in sources}) == 1 and len(dtypes) == 1
    return (sources, dtypes.pop()) if same else None


def _part(atom: Any, definitions: dict[Any, Any]) -> tuple[Any, int] | None:
    """Return the stack that an operand is a part of (see `parts_of`), and the part's index."""
    eqn = definitions.get(atom)
    if eqn is None or eqn.primitive is not UNSTACK:
        return None
    return eqn.invars[0], eqn.outvars.index(atom)
