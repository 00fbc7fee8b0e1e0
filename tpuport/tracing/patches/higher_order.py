"""Control flow that torch writes as operators on functions, as exported graphs have it."""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.control_flow.cond import traced_cond
from tpuport.tracing.control_flow.while_loop import traced_while
from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.sym_numbers import SYMBOLIC
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.patches._count import count


class HigherOrderOperators(Shim):
    """`torch.cond` and `torch.while_loop` become `lax.cond` and `lax.while_loop`."""

    TARGET = "torch.ops.higher_order"
    REASON = "operators on functions have no lowering; plain torchax cannot trace them"

    def replacements(self) -> list[Replacement]:
        eager = HigherOrderOperator.__call__

        def __call__(self: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
            if current() is None:
                return eager(self, *args, **kwargs)
            handler = _HANDLERS.get(self.name())
            if handler is not None:
                count(HigherOrderOperators.TARGET)
                return handler(*args, **kwargs)
            try:
                return eager(self, *args, **kwargs)
            except NotImplementedError as error:
                if "no rule registered for HigherOrderOperator" not in str(error):
                    raise
                raise port_error(
                    f"torch.ops.higher_order.{self.name()} has no equivalent here",
                    remedy="write it as a Python loop or branch, which is traced",
                    cause=error,
                ) from None

        return [Replacement(HigherOrderOperator, "__call__", __call__)]


def _cond(
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: tuple[Any, ...] = (),
) -> Any:
    return traced_cond(pred, true_fn, false_fn, tuple(operands))


def _while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: tuple[Any, ...],
    additional_inputs: tuple[Any, ...] = (),
) -> tuple[Any, ...]:
    def test(*carried: Any) -> Any:
        return cond_fn(*carried, *additional_inputs)

    def body(*carried: Any) -> tuple[Any, ...]:
        return tuple(body_fn(*carried, *additional_inputs))

    carried = tuple(carried_inputs)
    while True:
        again = test(*carried)
        if isinstance(again, (TracedTensor, *SYMBOLIC)):
            return traced_while(test, body, carried)
        if not again:
            # The operator's results are no aliases of its operands.
            return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in carried)
        carried = body(*carried)


_HANDLERS: dict[str, Callable[..., Any]] = {"cond": _cond, "while_loop": _while_loop}
