"""A ported call under torch's autograd: one jitted program forward, one backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import backend
from tpuport.foundation.interop.device_mark import tag
from tpuport.model.program_cache import BoundCall

# The inputs to differentiate with respect to: names in the state, numbers of arguments.
Wanted = tuple[tuple[str, ...], tuple[int, ...]]


def host_tensor(value: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    """Return an array as a tensor on the emulated accelerator."""
    return tag(backend.to_torch(value, dtype))


def differentiable(
    pure: Callable[..., Any], wanted: Wanted, labels: Callable[..., dict[str, Any]]
) -> Callable[..., Any]:
    """Return a program that runs forward and keeps what its backward pass needs.

    Args:
        pure: (state, key, values) to (outputs, *rest).
        wanted: the state and the arguments to differentiate with respect to.
        labels: gives the parts of `rest` that torch's graph misses, by a name for messages.

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
    """Refuse gradients through anything but the outputs of a call, as torch's graph misses them.

    Args:
        seed: any value that is differentiated; its trace tells which values depend on it.
        labelled: floating arrays by label.
        outs: the outputs.

    Raises:
        PortError: a gradient would have to flow through something else.
    """

    def depends(value: Any) -> bool:
        # A value without a tangent is a tracer of the enclosing trace.
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


# The function that jax.vjp returns is a pytree, so one jit serves the backward of all programs.
_pull = jax.jit(lambda pull, cotangents: pull(cotangents))


def _second_order(executable: Any, wanted: Wanted) -> Callable[..., list[jax.Array]]:
    """Return the derivative of a program's backward pass, which runs the program once more."""
    names, indices = wanted

    def twice(
        state: Any, key: Any, values: Any, primals: Any, cotangents: Any, seconds: Any
    ) -> list[jax.Array]:
        def back(primals: list[Any], cotangents: list[Any]) -> list[Any]:
            part = dict(zip(names, primals, strict=False))
            merged = list(values)
            for index, value in zip(indices, primals[len(names) :], strict=True):
                merged[index] = value
            _, pull, _ = executable({**state, **part}, key, merged)
            found, leaves = pull(cotangents)
            return [*(found[name] for name in names), *leaves]

        given = jax.vjp(back, primals, cotangents)[1](seconds)
        return [*given[0], *given[1]]

    return twice


@dataclass
class DifferentiatedCall:
    """One call that is to be differentiated, and its results."""

    prepared: BoundCall
    wanted: Wanted
    pull: Any = None
    rest: Any = None
    dtypes: list[torch.dtype] = field(default_factory=list)

    def run(self) -> list[torch.Tensor]:
        """Run forward and return the floating outputs, in order."""
        prepared = self.prepared
        flows, self.pull, self.rest = prepared.run()
        metas = prepared.compiled.outcome.out_metas
        stays = self.rest[0]
        self.dtypes = [m.dtype for m, stay in zip(metas, stays, strict=True) if stay is None]
        return [host_tensor(flow, d) for flow, d in zip(flows, self.dtypes, strict=True)]

    def pulled_back(self, gradients: list[Any]) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        """Run backward: map cotangents of the outputs to those of the state and the arguments."""
        cotangents = [
            backend.to_jax(g.to(dtype)) for g, dtype in zip(gradients, self.dtypes, strict=True)
        ]
        return _pull(self.pull, cotangents)

    def pulled_back_twice(
        self, gradients: list[torch.Tensor], seconds: list[torch.Tensor | None]
    ) -> list[jax.Array]:
        """Map cotangents of `pulled_back`'s results to those of state, arguments and cotangents."""
        prepared, (names, indices) = self.prepared, self.wanted
        executable = prepared.compiled.run
        primals = [prepared.picked[name] for name in names]
        primals += [prepared.given.values[index] for index in indices]
        cotangents = [
            backend.to_jax(g.to(dtype)) for g, dtype in zip(gradients, self.dtypes, strict=True)
        ]
        given = [
            jnp.zeros_like(primal) if second is None else backend.to_jax(second)
            for primal, second in zip(primals, seconds, strict=True)
        ]
        twice = executable.derived.get(self.wanted)
        if twice is None:
            twice = jax.jit(_second_order(executable, self.wanted))
            executable.derived[self.wanted] = twice
        return twice(
            prepared.picked, prepared.key, prepared.given.values, primals, cotangents, given
        )

    def results(self, flows: list[Any]) -> Any:
        """Return what `PortedModel._finish` takes, with these tensors as the floating outputs."""
        stays, rest = self.rest
        given = iter(flows)
        return ([next(given) if stay is None else stay for stay in stays], *rest)


class Through(torch.autograd.Function):
    """The node of a ported call in torch's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, call: DifferentiatedCall, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run the program; `tensors` are the inputs to differentiate, in the order of `call`."""
        ctx.like = [(t.dtype, t.shape) for t in tensors]
        flows = call.run()
        # Torch frees saved tensors after a backward pass, and raises at a second use. What
        # a program kept hangs on one, so a loss that a script collects keeps none of it alive.
        kept: Any = torch.empty(0)
        kept._tpuport_kept = (call, tensors)
        ctx.save_for_backward(kept)
        return tuple(flows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Run the backward program."""
        (kept,) = ctx.saved_tensors
        call, tensors = kept._tpuport_kept
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # create_graph=True
            return (None, *_Back.apply(call, needed, *tensors, *gradients))
        return (None, *_back(call, list(gradients), ctx.like, needed))


def _back(
    call: DifferentiatedCall,
    gradients: list[torch.Tensor],
    like: list[Any],
    needed: tuple[bool, ...],
) -> list[torch.Tensor | None]:
    state, leaves = call.pulled_back(gradients)
    found = [*(state[name] for name in call.wanted[0]), *leaves]
    return _given(found, like, needed)


def _given(found: list[Any], like: list[Any], needed: Any) -> list[torch.Tensor | None]:
    return [
        host_tensor(value, dtype) if wanted else None
        for value, (dtype, _), wanted in zip(found, like, needed, strict=True)
    ]


class _Back(torch.autograd.Function):
    """The node of a backward pass that is differentiated in turn, as for a gradient penalty."""

    @staticmethod
    def forward(
        ctx: Any, call: DifferentiatedCall, needed: Any, *given: torch.Tensor
    ) -> tuple[Any, ...]:
        """Return the gradients; `given` are the call's tensors, then the outputs' gradients."""
        count = len(needed)
        ctx.like = [(t.dtype, t.shape) for t in given]
        made = _back(call, list(given[count:]), ctx.like[:count], needed)
        kept: Any = torch.empty(0)
        kept._tpuport_kept = (call, given[count:])
        ctx.save_for_backward(kept)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *seconds: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of those gradients."""
        if torch.is_grad_enabled():
            raise PortError(
                "a third derivative through a program was asked for",
                code="TPU406",
                remedy="leave this class to eager PyTorch: porting(eager=(...)), or --eager",
            )
        (kept,) = ctx.saved_tensors
        call, gradients = kept._tpuport_kept
        found = call.pulled_back_twice(list(gradients), list(seconds))
        return (None, None, *_given(found, ctx.like, ctx.needs_input_grad[2:]))


def gradients(totals: list[torch.Tensor], of: list[torch.Tensor], **options: Any) -> Sequence[Any]:
    """Return the gradients of sums, None for each tensor without one or if there are no sums."""
    if not totals:
        return [None] * len(of)
    return torch.autograd.grad(totals, of, allow_unused=True, **options)
