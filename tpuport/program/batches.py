"""A batch cut into equal parts, for gradients that are added up."""

from collections.abc import Sequence
from typing import Any

from tpuport.errors import UsageError


def batch_size(values: Sequence[Any], paths: Sequence[str]) -> int:
    """The length that the first dim of every array with dims has.

    Args:
        values: the arrays of a call.
        paths: their names, for messages.

    Raises:
        UsageError: they differ, or there is none.
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
    """Arrays of shape (count, batch / count, ...); those without dims as they are.

    Raises:
        UsageError: the batch does not divide.
    """
    size = batch_size(values, paths)
    if size % count:
        raise UsageError(
            f"accumulate={count}: a batch of {size} cannot be cut into {count} equal parts. What to"
            " do: drop or pad the last batch of an epoch"
        )
    return [v.reshape(count, size // count, *v.shape[1:]) if v.ndim else v for v in values]
