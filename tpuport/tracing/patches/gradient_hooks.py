"""Hooks of tensors: what they make of a gradient is part of the program's backward pass."""

import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import torch

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.paths import Paths
from tpuport.tracing.core.tensor import TracedTensor, version, wrap
from tpuport.tracing.core.view_steps import ViewStep
from tpuport.tracing.functions.inner_gradients import refuse_unrecorded
from tpuport.tracing.patches._count import count
from tpuport.tracing.patches.autograd_function import apply_function

Hook = Callable[[torch.Tensor], torch.Tensor | None]


class TensorHook(Shim):
    """`Tensor.register_hook` gives the tensor a backward, as a custom autograd function does."""

    TARGET = "torch.Tensor.register_hook"
    REASON = "torch's autograd, which would call the hook, does not run in a ported program"

    def replacements(self) -> list[Replacement]:
        eager = torch.Tensor.register_hook

        def register_hook(tensor: torch.Tensor, hook: Hook) -> Any:
            trace = current()
            known = None if trace is None else trace.alias(tensor)
            traced = tensor if isinstance(tensor, TracedTensor) else known
            if trace is None or traced is None:
                return eager(tensor, hook)
            count(self.TARGET)
            return _register(trace, traced, hook)

        return [Replacement(torch.Tensor, "register_hook", register_hook)]


class _Handle(torch.utils.hooks.RemovableHandle):
    """The handle of a hook in a program; one that was removed in forward does nothing."""

    def __init__(self) -> None:
        super().__init__(OrderedDict())
        self.removed = False

    def remove(self) -> None:
        """Remove the hook."""
        self.removed = True


def _register(trace: Trace, tensor: TracedTensor, hook: Hook) -> _Handle:
    if not tensor.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if tensor._is_given:
        raise port_error(
            "a hook is registered on a parameter or an argument inside the ported function; in"
            " eager PyTorch each call adds one more to it",
            code="TPU403",
            remedy="register it once, outside, or on a tensor that the call makes: x.view_as(x)",
        )
    if _is_used(tensor._elem):
        raise port_error(
            "a hook is registered on a tensor that was used before; it would miss that part of the"
            " gradient",
            code="TPU403",
            remedy="call register_hook right after the line that makes the tensor",
        )
    handle = _Handle()
    earlier: list[tuple[Hook, _Handle]] = vars(tensor).get("_hooks", [])
    hooks, base, chain = [*earlier, (hook, handle)], tensor._elem, tensor._chain
    if earlier:
        base, chain = tensor._unhooked, chain[:-1]  # type: ignore[attr-defined]

    def attached(value: jax.Array) -> jax.Array:
        if value is base and vars(tensor).get("_hooks") is hooks:
            return tensor._hooked  # type: ignore[attr-defined]
        made = wrap(value, tensor.dtype, trace=trace, flow=tensor._flow)
        with torch.enable_grad():  # whatever mode it is registered or read in
            for one in reversed(hooks):  # the gradient goes through the first one first
                made = apply_function(trace, _Hooked, (made, *one))
        return made._elem

    hooked = attached(base)
    vars(tensor).update(_hooks=hooks, _unhooked=base, _hooked=hooked)
    tensor._chain = (*chain, ViewStep(attached, _refuse_write))
    tensor._keep(hooked)
    return handle


def _refuse_write(base: jax.Array, new: jax.Array) -> jax.Array:
    raise port_error(
        "a tensor is written in place after a hook was registered on it",
        code="TPU403",
        remedy="register the hook after the write, or write to another tensor: y = y.relu()",
    )


class _Hooked(torch.autograd.Function):
    """A tensor as it is, whose gradient goes through a hook."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, hook: Hook, handle: _Handle | None) -> torch.Tensor:
        ctx.hook, ctx.handle = hook, handle
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.handle is not None and ctx.handle.removed:
            return gradient, None, None
        before = version(gradient)
        given = ctx.hook(gradient)
        if given is None and version(gradient) == before:
            raise port_error(
                f"the gradient hook {_name(ctx.hook)} returns None: what it does besides (keeping"
                " or printing the gradient) would be done once, while the program is traced",
                code="TPU403",
                remedy="return the gradient that it should be, or take gradients with jax.grad",
            )
        return gradient if given is None else given, None, None


def _name(hook: Any) -> str:
    code = getattr(hook, "__code__", None)
    where = (
        f" at {code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else ""
    )
    return getattr(hook, "__qualname__", type(hook).__name__) + where


def _is_used(value: Any) -> bool:
    """Return whether an operation was recorded through which this value has a gradient."""
    refuse_unrecorded(value)
    frame = getattr(getattr(value, "_trace", None), "frame", None)
    if frame is None:  # a concrete value, of which nobody takes a gradient
        return False
    paths = Paths()
    return any(
        any(path.may >> i & 1 for path in paths.of_equation(equation))
        for equation in frame.get_eqns()
        for i, operand in enumerate(equation.invars)
        if operand is value.val
    )


def hooked_state(trace: Trace, leaves: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the hooks that were registered on parameters before the call.

    Args:
        trace: The trace, in which the parameters have their traced tensors.
        leaves: The parameters by name.
        values: The state by name.
    """
    changed: dict[str, Any] = {}
    for name, leaf in leaves.items():
        known = trace.substitutes.get(id(leaf))
        hooks = [] if known is None else _hooks_of(leaf)
        for hook in reversed(hooks):
            made = apply_function(trace, _Hooked, (known, hook, None))
            known._storage.set(made._elem)  # pyright: ignore[reportOptionalMemberAccess]
        if hooks:
            changed[name] = known._elem  # pyright: ignore[reportOptionalMemberAccess]
    return values | changed


def _hooks_of(leaf: Any) -> list[Hook]:
    after = getattr(leaf, "_post_accumulate_grad_hooks", None)
    return [*(leaf._backward_hooks or {}).values(), *([_refuse] if after else [])]


def _refuse(gradient: torch.Tensor) -> torch.Tensor:
    raise port_error(
        "a parameter has a hook that runs after its gradient was accumulated"
        " (register_post_accumulate_grad_hook), and jax does not accumulate gradients",
        code="TPU403",
        remedy="do what the hook does with the gradients that jax.grad returns",
    )
