"""The list that `.tolist()` gives of a tensor whose number of rows depends on data."""

import dis
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from tpuport.tracing.core.concretize import refuse_rows

if TYPE_CHECKING:
    from tpuport.tracing.core.tensor import TracedTensor


class ListLike:
    """What stands for a list in user code, which sees the class of one."""

    __slots__ = ()
    is_traced = True

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]  (nobody sets it)
        """Return the class that user code sees."""
        return list


class RowList:
    """A list of rows: a `for` may go over it, and it is an index as the tensor is."""

    is_traced = True

    def __init__(self, rows: "TracedTensor") -> None:
        self.rows = rows

    @property
    def count(self) -> Any:
        """Return how many rows there are, as a traced number."""
        return self.rows.shape[0]

    def __iter__(self) -> "RowIterator":
        return RowIterator(self)

    def __len__(self) -> int:
        if _is_index(sys._getframe(1)):
            raise TypeError("an index is not measured")
        return len(self.rows)

    def __bool__(self) -> bool:
        return bool(self.count != 0)

    def __contains__(self, value: Any) -> bool:
        return value in self.rows

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index].tolist()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refuse_rows()


class RowIterator:
    """An iterator over rows, which a loop takes from `zip` and `enumerate`; it gives none."""

    def __init__(self, source: "RowList | TracedTensor") -> None:
        self.source = source

    def __iter__(self) -> "RowIterator":
        return self

    def __next__(self) -> Any:
        raise refuse_rows()


# From Python 3.14 on, x[i] is a BINARY_OP.
_INDEXING = {"BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR", "BINARY_OP"}


def _is_index(frame: FrameType) -> bool:
    """Return whether the code that runs indexes something: torch measures each part of an index.

    It goes on where that raises. An answer would be a path of the program for each length.
    """
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _INDEXING
