"""The search for the first module whose output differs between eager PyTorch and the port."""

from collections.abc import Callable
from typing import Any

import jax
import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import ParityError, TpuportError
from tpuport.model.parity.verify import (
    SameNumbers,
    SavedTensorNeeded,
    Verifier,
    eager_copy,
    host_arguments,
    takes_gradients,
    without_saved_tensors,
)
from tpuport.reports.records import Divergence, Parity
from tpuport.tracing.core import arguments
from tpuport.tracing.core.export import to_torch
from tpuport.tracing.core.reentrancy import part_of_program
from tpuport.tracing.guards import host_randomness
from tpuport.tracing.scan_layers import stacked_params
from tpuport.tracing.state.request import TraceRequest


def first_difference(
    verifier: Any,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: jax.Array,
    before: dict[str, Any],
) -> Divergence | None:
    """Find the first module whose output differs beyond tolerance; return None if none does.

    Both sides run once and record every module's output when its call ends, so of nested modules
    the innermost comes first. The port runs operation by operation on concrete values here: a
    difference that only XLA's fusion makes is not found.
    """
    ported = verifier.ported
    if ported._tracer.master is None:
        return None
    casting = ported._tracer.casting
    cast = casting.compute is not None
    module = eager_copy(ported._eager() if cast else verifier.target)
    expected: list[tuple[str, str, Any]] = []
    _record(module, expected)
    mode = SameNumbers(key)
    host_args, host_kwargs = host_arguments((args, kwargs), mode)
    try:
        with (
            host_randomness.restored([module, host_args, host_kwargs]),
            without_saved_tensors(),
            mode,
            part_of_program(),
            casting.in_force(),
        ):
            ported._tracer.method(module, method)(*host_args, **host_kwargs)
    except (SavedTensorNeeded, RuntimeError) as error:
        if takes_gradients(error):
            return None
        raise
    got: list[tuple[str, str, Any]] = []
    leaves, spec, paths = arguments.flatten_call((args, kwargs))
    values, metas = arguments.argument_arrays(leaves, paths)
    state = stacked_params.unstack(before)
    request = TraceRequest(
        *(method, state, key, values, metas, spec),
        checks=False,
        known=state,
        known_leaves=dict(enumerate(values)),
        on_module=lambda module: _record(module, got),
    )
    try:
        ported._tracer.trace(request)
    except TpuportError:
        return None
    return _compare(verifier, expected, got)


def _record(module: torch.nn.Module, into: list[tuple[str, str, Any]]) -> None:
    def hook(name: str) -> Callable[..., None]:
        def after(owner: torch.nn.Module, inputs: Any, output: Any) -> None:
            del inputs
            leaves, _ = pytree.flatten(output)
            into.append((name, type(owner).__name__, [to_torch(leaf) for leaf in leaves]))

        return after

    for name, owner in module.named_modules():
        owner.register_forward_hook(hook(name))


def _compare(verifier: Any, expected: list[Any], got: list[Any]) -> Divergence | None:
    largest_before = 0.0
    for (name, cls, want), (other, _, have) in zip(expected, got, strict=False):
        if name != other:
            return Divergence(name, cls=cls, max_rel=float("inf"), input_max_rel=largest_before)
        worst = 0.0
        for record in verifier.compare("output", name, want, have):
            assert isinstance(record, Parity)
            if not record.ok:
                return Divergence(
                    name, cls=cls, max_rel=record.max_rel, input_max_rel=largest_before
                )
            worst = max(worst, record.max_rel)
        largest_before = max(largest_before, worst)
    return None


def fail(
    verifier: Verifier,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: jax.Array,
    before: dict[str, Any],
) -> None:
    """Raise for a failed comparison.

    The error names the worst value and the first module whose output differs.
    """
    report = verifier.ported.report
    worst = report.worst
    divergence = first_difference(verifier, method, args, kwargs, key, before)
    where = ""
    if divergence is not None:
        report.add(divergence)
        where = (
            f"; the first module that differs is {divergence.module or 'the model itself'}"
            f" ({divergence.cls})"
        )
    by = worst.problem or f"{worst.max_rel:.1e} relative (tolerance {worst.tolerance:.0e})"
    between = ": " if worst.problem else " by "
    msg = f"{worst.path} differs from eager PyTorch{between}{by}{where}"
    raise ParityError(
        msg,
        remedy=(
            "print(ported.report) shows every value; convert(..., rtol=...) accepts a larger"
            " error if it is rounding"
        ),
    )
