"""What rewritten code asks before it makes a table in `self` longer."""

from typing import Any

from tpuport.ops_masked import is_plain_torchax

__all__ = ["grows"]


def grows(test: Any) -> Any:
    """What a branch asks that makes a table in `self` longer if `test` holds.

    Args:
        test: Whether the table is too short.

    Returns:
        The test itself, also where `tpuport.convert` traces, which decides it by what is known of
        the sizes. In a program of torchax alone a traced test gives False, since the tables of a
        program keep their sizes: they have to be long enough when it is traced. Past the end of a
        table that is too short, indexing and `gather` read the last row, and `embedding` and
        `index_select` NaN; with `tpuport.ops.debug_checks` the program raises an `IndexError`.
    """
    from tpuport.ops import is_traced

    if not is_plain_torchax(test) or not is_traced(test):
        return test
    from tpuport.model.plain_torchax import traced_check

    error = IndexError("a table in self is too short, and a program cannot make it longer")
    traced_check(test, lambda: error)
    return False
