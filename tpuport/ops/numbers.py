"""Python numbers and truths of tensors, for rewritten code."""

from typing import Any

from tpuport.ops.traced import is_plain, is_traced


def negate(value: Any) -> Any:
    """Return `not value`."""
    if not is_traced(value):
        return not value
    if is_plain(value):
        from tpuport.ops.torchax.control_flow import traced_not

        return traced_not(value)
    import torch

    return torch.sym_not(to_bool(value))


def to_float(value: Any) -> Any:
    """Return `float(value)`; for a traced tensor, a traced number."""
    return _number(value, float)


def to_int(value: Any) -> Any:
    """Return `int(value)`; for a traced tensor, a traced number."""
    return _number(value, int)


def to_bool(value: Any) -> Any:
    """Return `bool(value)`; for a traced tensor, a traced truth value."""
    return _number(value, bool)


def _number(value: Any, kind: type) -> Any:
    if is_traced(value):
        if is_plain(value):
            from tpuport.ops.torchax.values import traced_number
        else:
            from tpuport.tracing.control_flow.cond import traced_number

        return traced_number(value, kind)
    return kind(value)


def length(value: Any) -> Any:
    """Return `len(value)`; for a traced tensor whose size depends on data, a traced number."""
    if not is_traced(value) or is_plain(value):
        return len(value)
    from tpuport.tracing.core.row_list import RowList
    from tpuport.tracing.dynamic_shapes import counted_rows

    if isinstance(value, RowList):
        return value.count
    if isinstance(value, counted_rows.CountedRows):
        return counted_rows.length(value)
    return value.shape[0] if value.dim() else len(value)


def item(value: Any) -> Any:
    """Return `value.item()`; for a traced tensor, a traced number."""
    if is_plain(value):
        from tpuport.ops.torchax import values

        return values.item(value)
    return value.item()


def to_list(value: Any) -> Any:
    """Return `value.tolist()`; for a traced tensor, nested lists of traced numbers."""
    if is_plain(value):
        from tpuport.ops.torchax import values

        return values.to_list(value)
    return value.tolist()


def validate_args(*values: Any) -> bool | None:
    """Return what to pass as `validate_args` to a distribution of `torch.distributions`.

    Args:
        values: The parameters of the distribution.

    Returns:
        None, which selects PyTorch's default; False if a parameter is traced, because a check
        would need its value.
    """
    return False if any(map(is_traced, values)) else None
