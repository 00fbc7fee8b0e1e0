"""Helpers that rewritten code calls where the original asked a tensor for its value.

In eager PyTorch every function here does exactly what the Python statement that it replaces does.
With a traced value it passes the decision to the program that is being traced, whether
`tpuport.convert` traces it or torchax alone does under `jax.jit`. Nothing is imported until a
traced value is met.
"""

from tpuport.foundation.plain_loops import Items, if_bound
from tpuport.ops.branches import (
    both,
    check,
    cond,
    either,
    first_falsy,
    first_truthy,
    for_each,
    for_items,
    for_range,
    grows,
    largest,
    passes,
    report,
    smallest,
    while_loop,
)
from tpuport.ops.masks import (
    count_elements,
    count_rows,
    inverse,
    masked,
    masked_select,
    mismatched,
    rowwise,
)
from tpuport.ops.numbers import (
    item,
    length,
    negate,
    to_bool,
    to_float,
    to_int,
    to_list,
    validate_args,
)
from tpuport.ops.tensors import (
    attention,
    cuda,
    filled,
    one_hot,
    to_cpu,
)
from tpuport.ops.torchax.debug_checks import are_checks_on, debug_checks
from tpuport.ops.traced import is_traced

__all__ = [
    "Items",
    "are_checks_on",
    "attention",
    "both",
    "check",
    "cond",
    "count_elements",
    "count_rows",
    "cuda",
    "debug_checks",
    "either",
    "filled",
    "first_falsy",
    "first_truthy",
    "for_each",
    "for_items",
    "for_range",
    "grows",
    "if_bound",
    "inverse",
    "is_traced",
    "item",
    "largest",
    "length",
    "masked",
    "masked_select",
    "mismatched",
    "negate",
    "one_hot",
    "passes",
    "report",
    "rowwise",
    "smallest",
    "to_bool",
    "to_cpu",
    "to_float",
    "to_int",
    "to_list",
    "validate_args",
    "while_loop",
]
