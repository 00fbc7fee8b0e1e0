"""The module that an operation belongs to, found by the names around it.

A program whose module calls are wrapped in `jax.named_scope(fqn)` carries the names into its jaxpr
(`eqn.source_info.name_stack`) and into the metadata of HLO
(`op_name="jit(f)/transpose(jvp(blocks.0))/blocks.0.attn/dot_general"`).
"""

import re
from collections.abc import Collection, Iterable

# Parts that JAX adds: transformations around a name, and parts that are not names of modules (an
# einsum is named by its formula).
_AROUND = re.compile(r"^(?:jvp|transpose|vmap|remat|checkpoint|rematted_computation)\((.*)\)$")
_STRUCTURE = re.compile(
    r"^(?:p?jit|xla_call|pmap|shmap)\(.*\)$|^(?:while|body|cond|scan|closed_call|checkpoint|remat\d?"
    r"|rematted_computation|shard_map|custom_[jv]+p_call(?:_jaxpr)?|core_call|pjit|jit"
    r"|branch_\d+_fun|body_pred|.*->.*|)$"
)


def scope_names(name_stack: object) -> tuple[str, ...]:
    """Return the names of a jaxpr equation's name stack, outermost first."""
    return tuple(_names(str(name_stack).split("/")))


def operation_names(op_name: str) -> tuple[str, ...]:
    """Return the names in `op_name` of an HLO instruction, without the operation at its end."""
    return tuple(_names(op_name.split("/")[:-1]))


def _names(parts: Iterable[str]) -> Iterable[str]:
    for part in parts:
        while found := _AROUND.match(part):
            part = found[1]
        if not _STRUCTURE.match(part):
            yield part


def innermost(names: Iterable[str], modules: Collection[str] | None) -> str:
    """Return the last name that is a module's, "" if there is none.

    Args:
        names: names around an operation, outermost first.
        modules: names of modules; None accepts any name.
    """
    return next((n for n in reversed(tuple(names)) if modules is None or n in modules), "")
