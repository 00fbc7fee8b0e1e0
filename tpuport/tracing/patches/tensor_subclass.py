"""The functions of torch's C++ by which packages make a tensor one of a class of their own."""

from typing import Any

import torch

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.foundation.pytree.tensor_classes import as_class, is_class_of_tensors
from tpuport.tracing.core.context import current
from tpuport.tracing.core.host_tape import current_tape
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.tensor_classes import refused
from tpuport.tracing.core.transforms import is_transformed


class TensorSubclass(Shim):
    """A tensor of a trace becomes a traced tensor of the class.

    One of the host becomes what it does in eager, also where a mode sees each op.
    """

    TARGET = "torch.Tensor.as_subclass, torch.Tensor._make_subclass, torch.Tensor.__new__"
    REASON = "an object that torch made for a tensor cannot become one of another class"

    def replacements(self) -> list[Replacement]:
        eager_new = torch.Tensor.__new__
        eager_make = torch.Tensor._make_subclass  # type: ignore[attr-defined]

        def as_subclass(self: torch.Tensor, cls: Any) -> torch.Tensor:
            traced = _traced(self)
            if traced is None and current() is not None and is_transformed(self):
                raise refused(cls, "inside torch.func, which has a tensor of its own there")
            return as_class(self, cls, counted=True) if traced is None else traced.as_subclass(cls)

        # Named arguments would have to be those of torch.compile's own version of a function.
        def new(*args: Any, **kwargs: Any) -> torch.Tensor:
            cls, *given = args
            tape = current_tape()
            if tape is not None and cls is torch.Tensor and tape.takes(given):
                return tape.record(torch.Tensor, given)
            if _is_left(cls, *given):
                return eager_new(cls, *given, **kwargs)
            is_tensor = len(given) == 1 and isinstance(given[0], torch.Tensor) and not kwargs
            tensor = given[0] if is_tensor else eager_new(torch.Tensor, *given, **kwargs)
            return torch.Tensor.as_subclass(tensor, cls)

        def make_subclass(*args: Any, **kwargs: Any) -> torch.Tensor:
            cls, data, *grad = args
            if _is_left(cls, data) or kwargs.keys() - {"require_grad"} or len(grad) > 1:
                return eager_make(*args, **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                made = torch.Tensor.as_subclass(torch.Tensor.detach(data), cls)
                wanted = grad[0] if grad else kwargs.get("require_grad", False)
                base = TracedTensor if isinstance(made, TracedTensor) else torch.Tensor
                return base.requires_grad_(made) if wanted else made

        return [
            Replacement(torch.Tensor, "as_subclass", as_subclass),
            Replacement(torch.Tensor, "__new__", staticmethod(new)),
            Replacement(torch.Tensor, "_make_subclass", staticmethod(make_subclass)),
        ]


def _is_left(cls: Any, *given: Any) -> bool:
    """Return whether torch makes a tensor of a class: of its own, and of no traced tensor."""
    is_traced = any(isinstance(value, TracedTensor) for value in given)
    return cls is torch.Tensor or not (is_traced or is_class_of_tensors(cls))


def _traced(value: Any) -> TracedTensor | None:
    """Return a traced tensor, or that which replaces one of the host; None for others."""
    if isinstance(value, TracedTensor):
        return value
    trace = current()
    return trace.alias(value) if trace is not None and isinstance(value, torch.Tensor) else None
