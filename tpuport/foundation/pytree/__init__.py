"""Python structures as pytrees: flatten, clone, snapshot, compare.

Unlike `jax.tree`, these walk any object that holds tensors, and keep shared references shared.
"""

from tpuport.foundation.pytree.children import (
    ATOMIC,
    ATOMS,
    CALLABLES,
    OPAQUE,
    Atom,
    attributes_of,
    children,
    dict_class,
    held_by_callable,
    is_open,
    is_plain,
    refill,
    walk,
)
from tpuport.foundation.pytree.tree import (
    Flattener,
    TreeSpec,
    flatten,
    flatten_with_paths,
    hashable,
    is_leaf,
    is_sparse,
    map_tensors,
    statics_of,
    unflatten,
    unflatten_node,
)

__all__ = [
    "ATOMIC",
    "ATOMS",
    "CALLABLES",
    "OPAQUE",
    "Atom",
    "Flattener",
    "TreeSpec",
    "attributes_of",
    "children",
    "dict_class",
    "flatten",
    "flatten_with_paths",
    "hashable",
    "held_by_callable",
    "is_leaf",
    "is_open",
    "is_plain",
    "is_sparse",
    "map_tensors",
    "refill",
    "statics_of",
    "unflatten",
    "unflatten_node",
    "walk",
]
