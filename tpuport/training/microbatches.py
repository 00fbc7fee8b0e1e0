"""Splitting of a batch into equal parts, whose gradients are accumulated."""

from collections.abc import Sequence
from typing import Any

from tpuport.foundation.errors import UsageError


def batch_size(values: Sequence[Any], paths: Sequence[str]) -> int:
    """Return the length of the first dim, which all arrays with dims share.

    Args:
        values: arrays of a call.
        paths: names of the arrays, for messages.

    Raises:
        UsageError: the lengths differ, or no array has dims.
    """
    sizes = {path: value.shape[0] for path, value in zip(paths, values, strict=True) if value.ndim}
    if len(set(sizes.values())) == 1:
        return next(iter(sizes.values()))
    found = ", ".join(f"{path or 'the argument'}: {size}" for path, size in sizes.items())
    raise UsageError(
        "accumulate: the first dim of all arguments is the batch, which is cut into parts, and"
        f" their lengths differ ({found or 'no argument has dims'}). What to do: give what is not"
        " of one example as a Python number or as part of the model"
    )


def in_parts(values: Sequence[Any], paths: Sequence[str], count: int) -> list[Any]:
    """Reshape arrays to (count, batch / count, ...); those without dims stay.

    Raises:
        UsageError: `count` does not divide the batch.
    """
    size = batch_size(values, paths)
    if size % count:
        raise UsageError(
            f"accumulate={count}: a batch of {size} cannot be cut into {count} equal parts. What to"
            " do: drop or pad the last batch of an epoch"
        )
    return [v.reshape(count, size // count, *v.shape[1:]) if v.ndim else v for v in values]
