"""The search for the first module whose output differs, and the error for a failed comparison."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from tpuport.foundation import pytree
from tpuport.foundation.errors import ParityError, TpuportError
from tpuport.model.parity.call import Call
from tpuport.model.parity.float64 import Float64
from tpuport.model.parity.judge import NOT_REPEATED, nearer_than_rounding
from tpuport.model.parity.same_numbers import SameNumbers
from tpuport.model.parity.structure import pairs
from tpuport.model.parity.verify import Verifier
from tpuport.reports.records import Divergence, Parity
from tpuport.reports.wording import from_float64
from tpuport.tracing.core import arguments
from tpuport.tracing.core.export import to_torch
from tpuport.tracing.core.int64 import is_64
from tpuport.tracing.functions.inner_gradients import NeedsProgram
from tpuport.tracing.guards import host_randomness
from tpuport.tracing.scan_layers import stacked_params
from tpuport.tracing.state.module_state import state_tree
from tpuport.tracing.state.request import TraceRequest

_WIDE = ("float64", "complex128")
# An error of this size is no rounding, whatever the tolerance.
_LARGE = 0.1

# By module in the order of execution: its fqn, its class, its output.
Outputs = list[tuple[str, str, Any]]


def first_difference(verifier: Verifier, call: Call) -> Divergence | None:
    """Find the first module whose output differs beyond rounding; return None if none does.

    Both sides run once and record every module's output when its call ends, so of nested modules
    the innermost comes first. The port runs operation by operation on concrete values here: a
    difference that only XLA's fusion makes is not found.
    """
    if call.module is None:
        return None
    numbers, exact = SameNumbers.of(call), Float64()
    expected: Outputs = []
    truth: Outputs = []
    with host_randomness.restored([call.module, call.args, call.kwargs]):
        verifier.run(call, numbers, on_module=lambda m: _record(m, expected, to_torch))
        if not verifier.why_no_float64:
            numbers = SameNumbers.of(call)
            verifier.run(call, numbers, exact, on_module=lambda m: _record(m, truth, exact.value))
    got = _of_port(call)
    return None if got is None else _compare(verifier, expected, truth or expected, got)


def _of_port(call: Call) -> Outputs | None:
    got: Outputs = []
    leaves, spec, paths = arguments.flatten_call((call.args, call.kwargs))
    values, metas = arguments.argument_arrays(leaves, paths)
    state = stacked_params.unstack(call.state)
    request = TraceRequest(
        *(call.method, state, call.key, values, metas, spec),
        checks=False,
        known=state,
        known_leaves=dict(enumerate(values)),
        on_module=lambda module: _record(module, got, to_torch),
    )
    try:
        dataclasses.replace(call.tracer, master=call.module).trace(request)
    except (TpuportError, NeedsProgram):  # gradients that the code asks for need a program
        return None
    return got


def _record(module: torch.nn.Module, into: Outputs, value: Callable[[Any], Any]) -> None:
    def hook(name: str) -> Callable[..., None]:
        def after(owner: torch.nn.Module, inputs: Any, output: Any) -> None:
            del inputs
            leaves, _ = pytree.flatten(output)
            if any(is_functorch_wrapped_tensor(leaf) for leaf in leaves):
                return  # inside a transformation of torch.func, which hides the values
            into.append((name, type(owner).__name__, [value(leaf) for leaf in leaves]))

        return after

    for name, owner in module.named_modules():
        if not isinstance(owner, torch.jit.ScriptModule):  # which take no hooks
            owner.register_forward_hook(hook(name))


def _compare(
    verifier: Verifier, expected: Outputs, truth: Outputs, got: Outputs
) -> Divergence | None:
    largest_before = 0.0
    for (name, cls, want), (_, _, exact), (other, _, have) in zip(
        expected, truth, got, strict=False
    ):
        if name != other:
            return Divergence(name, cls=cls, max_rel=float("inf"), input_max_rel=largest_before)
        worst = 0.0
        places = pairs(want, have, "output")
        exacts = pairs(exact, exact, "output")
        for place, in_float64 in zip(places, exacts, strict=False):
            record = verifier.record("output", place, 0.0)
            if not record.ok and not nearer_than_rounding(record, place, in_float64.want):
                return Divergence(
                    name, cls=cls, max_rel=record.max_rel, input_max_rel=largest_before
                )
            worst = max(worst, record.max_rel)
        largest_before = max(largest_before, worst)
    return None


def fail(verifier: Verifier, call: Call, records: list[Parity]) -> None:
    """Raise for a failed comparison.

    The error names the worst value, the first module whose output differs, and the cause if it is
    known.
    """
    report = verifier.ported.report
    worst = min(records, key=lambda record: (-record.used, record.path))
    divergence, where, remedy = None, "", _remedy(worst, verifier)
    if verifier.ported._is_composed(call.method):
        # The search traces a method as it is written: here with a copy of the model for each token.
        where = (
            f"; the first module that differs is not searched for, because {call.method} runs as"
            " several programs"
        )
        remedy = (
            "call forward of the port on these tokens, which is compared too. If it agrees and both"
            " tokens have nearly equal scores there, rounding chose one, and convert(...,"
            " verify=False) accepts that; if not, please report it with the code of the model"
        )
    else:
        divergence = first_difference(verifier, call)
    if divergence is not None:
        report.add(divergence)
        where = (
            f"; the first module that differs is {divergence.module or 'the model itself'}"
            f" ({divergence.cls})"
        )
    raise ParityError(f"{_difference(worst, verifier)}{where}", remedy=remedy)


def _difference(worst: Parity, verifier: Verifier) -> str:
    if worst.problem:
        return f"{worst.path}: {worst.problem}"
    if not worst.tolerance or not math.isfinite(worst.max_rel):
        at = f" at {list(worst.where)}" if worst.where else ""
        said = (
            f"{worst.path} differs from eager PyTorch: {worst.got:.9g} where eager PyTorch gives"
            f" {worst.expected:.9g}{at}"
        )
    else:
        said = (
            f"{worst.path} differs from eager PyTorch by {worst.max_rel:.1e} relative (tolerance"
            f" {worst.tolerance:.0e})"
        )
    found, why = from_float64(worst), verifier.why_no_float64
    return f"{said}{found and f'; {found}'}{why and f'; {why}'}"


def _remedy(worst: Parity, verifier: Verifier) -> str:
    # A cache that the first call fills changes too, and no result.
    if verifier.changed_outside and (worst.problem or verifier.why_no_float64 == NOT_REPEATED):
        names = ", ".join(name.lstrip(".") for name in verifier.changed_outside[:3])
        return (
            f"the call changes {names}, which is outside of the module, so the port did not start"
            " from what eager PyTorch started from. Keep it in the module, as a buffer, or pass it"
            " in and return it"
        )
    shows = "print(ported.report) shows every value"
    if not is_64() and (worst.dtype in _WIDE or _holds_wide(verifier)):
        return (
            "the code computes in float64, which JAX holds in 32 bits:"
            f' jax.config.update("jax_enable_x64", True) before convert; {shows}'
        )
    if worst.problem or not worst.max_rel <= _LARGE or worst.rounding is not None:
        return (
            f"{shows}. This is more than rounding: please report it with the code of the module"
            " that differs"
        )
    return f"{shows}; convert(..., rtol=...) accepts a larger error if it is rounding"


def _holds_wide(verifier: Verifier) -> bool:
    """Return whether the module has a parameter or buffer in float64."""
    if not isinstance(verifier.target, torch.nn.Module):
        return False
    leaves = state_tree(verifier.target).leaves.values()
    return any(str(leaf.dtype).removeprefix("torch.") in _WIDE for leaf in leaves)
