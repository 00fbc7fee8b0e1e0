"""The helper that rewritten code calls before it makes a table in `self` longer."""

from typing import Any

from tpuport.ops.masked import is_plain_torchax

__all__ = ["grows"]


def grows(test: Any) -> Any:
    """Return the test of a branch that makes a table in `self` longer.

    Args:
        test: Whether the table is too short.

    Returns:
        The test itself, also under `tpuport.convert`, which decides it from the known sizes. Under
        torchax alone a traced test gives False: the tables of a program keep their sizes, so they
        have to be long enough when it is traced. Past the end of a table that is too short,
        indexing and `gather` read the last row, while `embedding` and `index_select` give NaN;
        with `tpuport.ops.debug_checks` the program raises an `IndexError`.
    """
    from tpuport.ops import is_traced

    if not is_plain_torchax(test) or not is_traced(test):
        return test
    from tpuport.ops.torchax.control_flow import traced_check

    error = IndexError("a table in self is too short, and a program cannot make it longer")
    traced_check(test, lambda: error)
    return False
