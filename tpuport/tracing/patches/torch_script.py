"""Functions and methods of TorchScript: its interpreter calls `detach` for autograd of its own."""

from typing import Any

import torch
from torch.jit._recursive import wrap_cpp_module

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.patches._count import count


class TorchScript(Shim):
    """A scripted function is the Python function; in a scripted method, `detach` keeps gradients.

    After some calls with gradients, the interpreter detaches the operands of a part of the graph
    and gives the results gradients by itself, of which a trace sees the first half only.
    """

    TARGET = "torch.jit.ScriptFunction.__call__"
    REASON = "TorchScript's own autograd hides from a trace that results have gradients"

    def replacements(self) -> list[Replacement]:
        return [
            Replacement(kind, "__call__", _call_of(kind))
            for kind in (torch.jit.ScriptFunction, torch._C.ScriptMethod)
        ]


def _call_of(kind: Any) -> Any:
    eager = kind.__call__

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        trace = current()
        if trace is None:
            return eager(self, *args, **kwargs)
        count(TorchScript.TARGET)
        source = getattr(self, "_torchdynamo_inline", None)
        if source is not None:
            return source(*args, **kwargs)
        _refuse_unseen(self)
        before, trace.in_script = trace.in_script, True
        try:
            return eager(self, *args, **kwargs)
        finally:
            trace.in_script = before

    return call


def _refuse_unseen(compiled: Any) -> None:
    """Refuse what TorchScript does where a trace does not see it.

    Raises:
        PortError: it reads parameters of its own, writes to attributes, or calls `detach` itself.
    """
    owner = getattr(compiled, "owner", None)
    module = None if owner is None else wrap_cpp_module(owner)
    graph, problem = compiled.inlined_graph, None
    if module is not None and any(weight.requires_grad for weight in module.parameters()):
        problem = "reads parameters, which TorchScript keeps where they get no gradient here"
    elif module is not None and _Written(training=module.training).is_in(graph):
        problem = "writes to its attributes, which TorchScript keeps where copies share them"
    elif "aten::detach" in str(graph):
        problem = "calls detach, which cannot be told from the calls of TorchScript's own autograd"
    if problem is not None:
        raise port_error(
            f"{compiled.name}, compiled by TorchScript, {problem}",
            code="TPU403",
            remedy="convert the module from before torch.jit.script or torch.jit.trace; a module"
            " that is made under porting() is not compiled by them",
        )


class _Written:
    """A search for writes to attributes in a graph of TorchScript, where they may run."""

    def __init__(self, *, training: bool) -> None:
        self.training = training

    def is_in(self, block: Any) -> bool:
        """Return whether a block of the graph writes to an attribute of a module."""
        return any(map(self._writes, block.nodes()))

    def _writes(self, node: Any) -> bool:
        blocks = list(node.blocks())
        if blocks:
            chosen = self._known(node.inputsAt(0)) if node.kind() == "prim::If" else None
            return any(map(self.is_in, blocks if chosen is None else [blocks[not chosen]]))
        if node.kind() == "prim::SetAttr":
            return True
        if node.kind() == "aten::batch_norm":  # its schema does not say that it writes
            return self._known(node.inputsAt(5)) is True and _is_of_attribute(node.inputsAt(3))
        values = zip(_arguments(node), node.inputs(), strict=False)
        return any(a.is_write and _is_of_attribute(value) for a, value in values if a is not None)

    def _known(self, value: Any) -> Any:
        """Return the value of a condition that follows from the mode, or None."""
        node = value.node()
        if node.kind() == "prim::GetAttr" and node.s("name") == "training":
            return self.training
        if node.kind() == "prim::Constant":
            return value.toIValue()
        chosen = self._known(node.inputsAt(0)) if node.kind() == "prim::If" else None
        if chosen is None:
            return None
        index = [one.debugName() for one in node.outputs()].index(value.debugName())
        block = list(node.blocks())[not chosen]
        return self._known(list(block.outputs())[index])


def _arguments(node: Any) -> list[Any]:
    """Return what the schema of a node says about the memory of each argument."""
    schema = node.schema()
    if schema == "(no schema)":
        return []
    return [argument.alias_info for argument in torch._C.parse_schema(schema).arguments]


def _is_of_attribute(value: Any) -> bool:
    """Return whether a value is an attribute of a module, an element or a view of one."""
    node = value.node()
    if node.kind() == "prim::GetAttr":
        return True
    if node.kind() in ("prim::ListUnpack", "prim::TupleUnpack"):
        return _is_of_attribute(node.inputsAt(0))
    shared = zip(_arguments(node), node.inputs(), strict=False)
    return any(_is_of_attribute(one) for alias, one in shared if alias is not None)
