"""A ported call under torch's autograd: one jitted program forward, one backward."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.errors import PortError
from tpuport.model import backend
from tpuport.model.arguments import Unsized
from tpuport.model.compiled import Prepared
from tpuport.running.tags import tag

# What a gradient can flow through: by name in the state, by number in the arguments.
Wanted = tuple[tuple[str, ...], tuple[int, ...]]


def host_tensor(value: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    """An array as a tensor on the emulated accelerator."""
    return tag(backend.to_torch(value, dtype))


@dataclass
class Differentiable:
    """A compiled program in two halves: forward, keeping what backward needs, and backward."""

    forward: Any
    backward: Any

    @classmethod
    def of(cls, prepared: Prepared, wanted: Wanted, registered: set[str]) -> "Differentiable":
        """Split a program by the chain rule; each half is jitted once.

        Args:
            prepared: a call of the program.
            wanted: the state and the arguments to differentiate with respect to.
            registered: names of parameters and buffers (a buffer holds no graph).

        Raises:
            PortError: a gradient would have to flow through something that is no output.
        """
        program, (names, indices) = prepared.compiled.program, wanted

        def parted(consts: Any, picked: Any, key: Any, values: list[Any]) -> tuple[Any, Any, Any]:
            def call(state: dict[str, Any], leaves: list[Any]) -> Any:
                merged = list(values)
                for index, leaf in zip(indices, leaves, strict=True):
                    merged[index] = leaf
                outs, *rest = program(consts, {**picked, **state}, key, merged)
                flows = [out for out in outs if _is_float(out)]
                stays = [None if _is_float(out) else out for out in outs]
                return flows, (stays, rest)

            return call, {name: picked[name] for name in names}, [values[i] for i in indices]

        @jax.jit
        def forward(consts: Any, picked: Any, key: jax.Array, values: list[Any]) -> Any:
            return jax.vjp(*parted(consts, picked, key, values), has_aux=True)

        consts = prepared.compiled.hoisted
        call, *given = parted(consts, prepared.picked, prepared.key, prepared.values)
        _refuse_lost_gradients(call, given, prepared, registered)
        return cls(forward, jax.jit(lambda pull, cotangents: pull(cotangents)))


def _is_float(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


@dataclass
class Call:
    """One call that is to be differentiated, and what it gave."""

    prepared: Prepared
    wanted: Wanted
    halves: Differentiable
    pull: Any = None
    rest: Any = None
    dtypes: list[torch.dtype] = field(default_factory=list)

    def run(self) -> list[torch.Tensor]:
        """Run forward: the floating outputs, in order."""
        prepared = self.prepared
        with prepared.timing:
            flows, self.pull, self.rest = self.halves.forward(
                prepared.compiled.hoisted, prepared.picked, prepared.key, prepared.values
            )
        metas = prepared.compiled.outcome.out_metas
        stays = self.rest[0]
        self.dtypes = [m.dtype for m, stay in zip(metas, stays, strict=True) if stay is None]
        return [host_tensor(flow, d) for flow, d in zip(flows, self.dtypes, strict=True)]

    def pulled_back(self, gradients: list[Any]) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        """Run backward: cotangents of the outputs to those of the state and of the arguments."""
        cotangents = [
            backend.to_jax(g.to(dtype)).astype(backend.jax_dtype(dtype))
            for g, dtype in zip(gradients, self.dtypes, strict=True)
        ]
        return self.halves.backward(self.pull, cotangents)

    def results(self, flows: list[Any]) -> Any:
        """What `PortedModel._finish` takes, with these tensors for the floating outputs."""
        stays, rest = self.rest
        given = iter(flows)
        return ([next(given) if stay is None else stay for stay in stays], *rest)


def _refuse_lost_gradients(
    call: Any, given: list[Any], prepared: Prepared, registered: set[str]
) -> None:
    """Torch's graph goes through the outputs of a call only.

    Raises:
        PortError: a gradient would have to flow through something else.
    """
    if any(isinstance(meta, Unsized) for meta in prepared.compiled.outcome.out_metas):
        raise PortError(
            "an output that takes part in a backward pass has a size that depends on data",
            code="TPU203",
            remedy="return it at full size together with its mask",
        )

    def others(state: Any, leaves: Any) -> dict[str, jax.Array]:
        _, (_, (new, written, put, _)) = call(state, leaves)
        found = {f"the attribute {name!r}": v for name, v in new.items() if name not in registered}
        found |= {f"the argument {prepared.paths[int(i)]}": v for i, v in written.items()}
        found |= {f"an object among the arguments (tensor {i})": v for i, v in enumerate(put)}
        return {label: value for label, value in found.items() if _is_float(value)}

    if not jax.eval_shape(others, *given):
        return
    for label in sorted(_depending(others, given)):
        raise PortError(
            f"{label} is given a tensor with a gradient, which would end there",
            code="TPU406",
            remedy="store it .detach()ed, or return it",
        )


def _depending(call: Any, given: list[Any]) -> set[str]:
    """Labels of what a call gives that depends on what is differentiated.

    Args:
        call: gives floating arrays by label.
        given: its arguments.
    """

    def tangents(*directions: Any) -> dict[str, jax.Array]:
        return jax.jvp(call, tuple(given), directions)[1]

    closed, shape = jax.make_jaxpr(tangents, return_shape=True)(*given)
    reached = set(closed.jaxpr.invars)
    for equation in closed.jaxpr.eqns:
        if any(not hasattr(v, "val") and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    outs = zip(sorted(shape), closed.jaxpr.outvars, strict=True)
    return {label for label, var in outs if not hasattr(var, "val") and var in reached}


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
    return torch.from_numpy(draw / max(tensor.numel(), 1) ** 0.5).to(tensor.dtype)
