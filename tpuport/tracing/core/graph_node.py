"""The `grad_fn` of a traced tensor."""

from typing import Any

import torch

from tpuport.tracing.core.errors import error_here, port_error


class GraphNode:
    """The `grad_fn` of a computed tensor in a trace, where torch's autograd records no graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def register_hook(self, hook: Any) -> Any:
        """Refuse the backward pass: a hook of a node sees gradients that jax does not have."""

        def refuse(_: torch.Tensor) -> torch.Tensor:
            raise refusal

        del hook
        refusal = error_here(
            "a hook of torch's autograd graph (grad_fn.register_hook, or a module's"
            " register_backward_hook) sees gradients that jax does not keep",
            code="TPU403",
            remedy="use register_full_backward_hook, or take gradients without the hook",
        )
        return self._tensor.register_hook(refuse)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise port_error(
            f"torch's autograd graph (grad_fn.{name}) inside a ported function",
            code="TPU403",
            remedy="take gradients outside, with jax.grad of ported.apply",
        )
