"""A ported call under torch's autograd: one jitted program forward, one backward."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.errors import PortError
from tpuport.model import backend
from tpuport.model.compiled import Prepared
from tpuport.running.tags import tag

# What a gradient can flow through: by name in the state, by number in the arguments.
Wanted = tuple[tuple[str, ...], tuple[int, ...]]


def host_tensor(value: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    """An array as a tensor on the emulated accelerator."""
    return tag(backend.to_torch(value, dtype))


def differentiable(
    pure: Callable[..., Any], wanted: Wanted, labels: Callable[..., dict[str, Any]]
) -> Callable[..., Any]:
    """A program that runs forward and keeps what its backward pass needs.

    Args:
        pure: (state, key, values) to (outputs, *rest).
        wanted: the state and the arguments to differentiate with respect to.
        labels: what of `rest` torch's graph does not go through, by a name for the reader.

    Returns:
        A function of the same arguments to (floating outputs, the function that pulls their
        cotangents back, (other outputs, rest)).

    Raises:
        PortError: (the function, while it is traced) a gradient would have to flow through
            something that is no output.
    """
    names, indices = wanted

    def forward(state: dict[str, Any], key: Any, values: list[Any]) -> Any:
        def call(part: dict[str, Any], leaves: list[Any]) -> Any:
            merged = list(values)
            for index, leaf in zip(indices, leaves, strict=True):
                merged[index] = leaf
            outs, *rest = pure({**state, **part}, key, merged)
            _refuse_lost_gradients((*part.values(), *leaves)[0], labels(*rest), outs)
            flows = [out for out in outs if _is_float(out)]
            return flows, ([None if _is_float(out) else out for out in outs], rest)

        given = {name: state[name] for name in names}
        return jax.vjp(call, given, [values[i] for i in indices], has_aux=True)

    return forward


def _is_float(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def _refuse_lost_gradients(seed: Any, labelled: dict[str, Any], outs: list[Any]) -> None:
    """Torch's graph goes through the outputs of a call only.

    Args:
        seed: something that is differentiated.
        labelled: floating arrays by label.
        outs: the outputs.

    Raises:
        PortError: a gradient would have to flow through something else.
    """

    def depends(value: Any) -> bool:
        # What has no tangent is a tracer of the trace outside.
        return _is_float(value) and getattr(value, "_trace", None) is seed._trace

    for label, value in labelled.items():
        if depends(value):
            raise PortError(
                f"{label} is given a tensor with a gradient, which would end there",
                code="TPU406",
                remedy="store it .detach()ed, or return it",
            )
    if any(isinstance(out, tuple) and depends(out[0]) for out in outs):
        raise PortError(
            "an output that takes part in a backward pass has a size that depends on data",
            code="TPU203",
            remedy="return it at full size together with its mask",
        )


_pull = jax.jit(lambda pull, cotangents: pull(cotangents))


@dataclass
class Call:
    """One call that is to be differentiated, and what it gave."""

    prepared: Prepared
    wanted: Wanted
    pull: Any = None
    rest: Any = None
    dtypes: list[torch.dtype] = field(default_factory=list)

    def run(self) -> list[torch.Tensor]:
        """Run forward: the floating outputs, in order."""
        prepared = self.prepared
        with prepared.timing:
            flows, self.pull, self.rest = prepared.compiled.run(
                prepared.picked, prepared.key, prepared.values
            )
        metas = prepared.compiled.outcome.out_metas
        stays = self.rest[0]
        self.dtypes = [m.dtype for m, stay in zip(metas, stays, strict=True) if stay is None]
        return [host_tensor(flow, d) for flow, d in zip(flows, self.dtypes, strict=True)]

    def pulled_back(self, gradients: list[Any]) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        """Run backward: cotangents of the outputs to those of the state and of the arguments."""
        cotangents = [
            backend.to_jax(g.to(dtype)) for g, dtype in zip(gradients, self.dtypes, strict=True)
        ]
        return _pull(self.pull, cotangents)

    def results(self, flows: list[Any]) -> Any:
        """What `PortedModel._finish` takes, with these tensors for the floating outputs."""
        stays, rest = self.rest
        given = iter(flows)
        return ([next(given) if stay is None else stay for stay in stays], *rest)


class Through(torch.autograd.Function):
    """The node that a ported call is in torch's graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the program; `tensors` are what gradients are wanted for, in the order of `call`."""
        ctx.call, ctx.like = call, [(t.dtype, t.shape) for t in tensors]
        return tuple(call.run())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (once_differentiable's stub)
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[Any, ...]:
        """Run its other half."""
        state, leaves = ctx.call.pulled_back(list(gradients))
        names, _ = ctx.call.wanted
        found = [*(state[name] for name in names), *leaves]
        return (
            None,
            *(
                host_tensor(value, dtype) if wanted else None
                for value, (dtype, _), wanted in zip(
                    found, ctx.like, ctx.needs_input_grad[1:], strict=True
                )
            ),
        )


def projection(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Fixed random weights for one output: comparing one gradient of them all is enough."""
    draw = np.random.default_rng(index).standard_normal(tuple(tensor.shape))
    return torch.as_tensor(draw / max(tensor.numel(), 1) ** 0.5).to(tensor.dtype)
