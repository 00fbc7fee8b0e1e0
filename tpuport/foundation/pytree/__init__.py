"""Python structures as pytrees: flatten, clone, snapshot, compare.

Unlike `jax.tree`, these walk any object that holds tensors, and keep shared references shared.
"""

from tpuport.foundation.pytree.tree import (
    ATOMIC,
    ATOMS,
    OPAQUE,
    Flattener,
    TreeSpec,
    attributes_of,
    flatten,
    flatten_with_paths,
    hashable,
    is_leaf,
    is_open,
    is_plain,
    map_tensors,
    set_item,
    slots_of,
    statics_of,
    unflatten,
    unflatten_node,
)

__all__ = [
    "ATOMIC",
    "ATOMS",
    "OPAQUE",
    "Flattener",
    "TreeSpec",
    "attributes_of",
    "flatten",
    "flatten_with_paths",
    "hashable",
    "is_leaf",
    "is_open",
    "is_plain",
    "map_tensors",
    "set_item",
    "slots_of",
    "statics_of",
    "unflatten",
    "unflatten_node",
]
