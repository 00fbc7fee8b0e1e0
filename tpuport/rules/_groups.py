"""Signs that code deals with groups of processes.

Such code knows that there may be no group, so its calls are not faults.
"""

import ast
import re

from tpuport.rules._origins import last_name
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import Module

# Names that code gives to a process group.
_GROUP = re.compile(r"\b(\w*_)?(group|mesh|pg)\b")
_STARTS = re.compile(r"\b(init_process_group|(init|setup)_dist\w*|PartialState|Accelerator)\(")
# What is the same whatever connects the processes: ranks, barriers, Python objects.
_ANY_GROUP = re.compile(r"^get_|barrier$|_object")
# Words in a test after which code may take a process group for granted.
ASKS_GROUP = re.compile(
    r"initiali[sz]ed|is_available|world_size|rank|group|distributed|parallel|ddp|fsdp|dist\b"
    r"|num_processes|enable_sp|use_sp|multi_?(gpu|node|process)|torchrun|launch|WORLD|RANK",
    re.IGNORECASE,
)


def is_chosen(call: ast.Call, module: Module) -> bool:
    """Return whether a call is meant only for a configuration with several processes."""
    child: ast.AST = call
    for parent in module.ancestors(call):
        if isinstance(parent, ast.If) and child in parent.orelse and _speaks_of_group(parent.body):
            return False  # the other side is the one for several processes
        if isinstance(parent, ast.If | ast.IfExp):
            return True
        child = parent
    if deals_with_groups(call, module) and not _makes_group(call):
        return True
    return _STARTS.search(module.text.text) is not None and not _makes_group(call)


def follows_a_start(call: ast.Call, context: Context) -> bool:
    """Return whether host code asks what any group answers, once its file's start of it works."""
    starts = _STARTS.search(context.module.text.text) is not None
    asks = _ANY_GROUP.search(last_name(call.func) or "") is not None
    return starts and asks and not context.in_step(call)


def _speaks_of_group(statements: list[ast.stmt]) -> bool:
    return any(_GROUP.search(ast.unparse(statement)) for statement in statements)


def deals_with_groups(node: ast.AST, module: Module) -> bool:
    """Return whether the function around a node mentions a group of processes."""
    function = module.function(node)
    if function is None:
        return False
    text = ast.unparse(function)
    return _GROUP.search(text) is not None and "param_groups" not in text  # an optimizer's


def _makes_group(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith(("init_process_group", "new_group", "init_device_mesh"))


def has_group(call: ast.Call) -> bool:
    """Return whether a call is passed a group, judging by the names in its arguments."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(_GROUP.search(ast.unparse(value)) for value in values)
