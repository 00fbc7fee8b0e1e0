"""Writes of eager code to tensors outside of its module, which a comparison must not leave behind.

A program that writes to such a tensor is refused. The run of eager PyTorch that it is compared with
comes first, and writes for real.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tpuport.foundation.errors import PortError
from tpuport.foundation.user_frames import user_line
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.op_info import op_info

_REMEDY = "make it a buffer of the module, or convert the module that owns it"


def written_outside(tensor: torch.Tensor, place: str | None = None) -> PortError:
    """Return the refusal of a write to a tensor that is no part of the module, at a line."""
    return port_error(
        f"a tensor of shape {tuple(tensor.shape)} that is neither an argument nor state of"
        " the ported module is written in place (a global, or one in a closure)",
        code="TPU406",
        remedy=_REMEDY,
        place=place,
    )


class OutsideWrites(TorchDispatchMode):
    """A dispatch mode that keeps what tensors held before they are written.

    Args:
        tensors: the tensors; writes to views of them count.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        strided = [one for one in tensors if one.layout is torch.strided]
        self._tensors = {one.untyped_storage()._cdata: one for one in strided}
        # Their memory, which `x.data = y` does not write, but replaces.
        self._memory = [(one, one.detach()) for one in self._tensors.values()]
        # The bytes before the first write to each, and its line.
        self._before: dict[int, tuple[torch.Tensor, str | None]] = {}

    def __bool__(self) -> bool:
        """Return whether there are tensors to watch."""
        return bool(self._tensors)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, HigherOrderOperator):
            for index, name in op_info(func).writes:
                self._note(args[index] if index < len(args) else kwargs.get(name))
        return func(*args, **kwargs)

    def _note(self, target: Any) -> None:
        targets = target if isinstance(target, (list, tuple)) else [target]
        for one in targets:
            if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
                continue
            key = one.untyped_storage()._cdata
            if key in self._tensors and key not in self._before:
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    self._before[key] = _memory_of(self._tensors[key]).clone(), user_line()

    def restore(self) -> None:
        """Give tensors that were written what they held before."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for tensor, memory in self._replaced():
                tensor.data = memory
            for key, (held, _) in self._before.items():
                _memory_of(self._tensors[key]).copy_(held)
        self._before.clear()

    def refusal(self) -> PortError | None:
        """Return the refusal of the first write; None if there was none."""
        for key, (_, line) in self._before.items():
            return written_outside(self._tensors[key], line)
        for tensor, _ in self._replaced():
            return written_outside(tensor)
        return None

    def _replaced(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors that have other memory by now, with that which they had."""
        with torch._C.DisableTorchFunction():
            return [
                (tensor, memory)
                for tensor, memory in self._memory
                if tensor.untyped_storage()._cdata != memory.untyped_storage()._cdata
            ]


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
