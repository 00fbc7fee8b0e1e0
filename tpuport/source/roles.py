"""What runs a piece of code: the traced step, set-up before it, or the host around both."""

import ast
from enum import Enum

from tpuport.source.module import FUNCTIONS, Function, Module


class Role(Enum):
    """What runs code.

    `STEP` is `forward`, a training step, or what they call: it is traced. `SETUP` runs before:
    imports, constructors, weight loading. `HOST` runs around the step and is never traced: data
    loading, logging, scripts.
    """

    STEP = "step"
    SETUP = "setup"
    HOST = "host"


class Roles:
    """The roles of the functions of one file."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def of(self, node: ast.AST) -> Role:
        """What runs the code at a node."""
        function = self.module.outermost_function(node)
        if not isinstance(function, FUNCTIONS):
            return Role.SETUP
        return self._of_function(function)

    def _of_function(self, function: Function) -> Role:
        return Role.SETUP if function.name == "__init__" else Role.STEP
