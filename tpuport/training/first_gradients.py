"""The gradients of a first training step beside those of eager PyTorch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import torch

from tpuport.foundation import pytree
from tpuport.foundation.interop import backend
from tpuport.foundation.pytree.clone import clone_module
from tpuport.model.parity import gradients
from tpuport.model.parity.call import Call
from tpuport.model.parity.verify import Reference
from tpuport.training.call import PlacedArguments
from tpuport.training.first_call_state import settled
from tpuport.training.microbatches import in_parts
from tpuport.training.state import TrainState
from tpuport.training.step_function import Batch, Training, known_values, measured

# The program runs once: on a CPU compiling it well takes longer than it does.
_ONCE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def compare_first(training: Training, state: TrainState, call: PlacedArguments) -> None:
    """Compare the gradients of a method's first step with eager PyTorch's, if the model verifies.

    Of a batch that is cut into parts it is the first part. Several processes have only parts of the
    values each, and compare nothing.

    Raises:
        ParityError: a gradient differs beyond the tolerance.
    """
    ported = training.ported
    verifier, path = ported._verifier, ("step", training.method, training.trained)
    if verifier is None or path in verifier.done or jax.process_count() > 1:
        return
    if not all(isinstance(meta, torch.Tensor) for meta in call.metas):
        return  # a generator, of which a step has only the key
    values, key = call.values, training.key_of_step(state)
    if training.accumulate > 1:
        parts = in_parts(values, call.paths, training.accumulate)
        values = [part[0] if one.ndim else one for part, one in zip(parts, values, strict=True)]
        key = jax.random.fold_in(key, 0)
    with ported.report.timed("verify"):
        have, verifier.kept = settled(lambda: _of_program(training, state, call, values, key))
        described = _described(training, state, call, values, key)
        expected = verifier.reference(described)
        pairs = gradients.paired(_of_eager(expected), *have)
        records = verifier.check(described, expected, pairs, _of_eager)
    ported._judge(described, verifier, records)
    verifier.done.add(path)


def _of_program(
    training: Training, state: TrainState, call: PlacedArguments, values: list[Any], key: Any
) -> tuple[tuple[dict[str, Any], set[str]], list[Any]]:
    """Return the gradients of the loss by parameter, as a step computes them.

    Return too what their backward pass is given.
    """
    batch = Batch(
        values, _metas(call, values), call.spec, call.paths, known_values(values, accumulate=1)
    )
    whole, rest = replace(training, accumulate=1), {**state.frozen, **state.buffers}

    def loss(params: Any) -> Any:
        return measured(whole, {}, batch, params, rest, key, values)[0], None

    with training.ported._precision_scope():
        options = _ONCE if jax.default_backend() == "cpu" else None
        made, has_gradient, kept = gradients.differentiated(loss, options)(state.params)
    return gradients.by_parameter(made, has_gradient), kept


def _described(
    training: Training, state: TrainState, call: PlacedArguments, values: list[Any], key: Any
) -> Call:
    ported = training.ported
    pairs = zip(values, _metas(call, values), strict=True)
    args, kwargs = pytree.unflatten(
        call.spec, [backend.to_torch(value, meta.dtype) for value, meta in pairs]
    )
    given = {**state.frozen, **state.buffers, **state.params}
    module = clone_module(ported._module, lambda tensor: tensor)[0]
    return Call(training.method, args, kwargs, key, given, module, ported._tracer, trainable=True)


def _metas(call: PlacedArguments, values: list[Any]) -> list[Any]:
    pairs = zip(call.metas, values, strict=True)
    return [meta.new_empty(tuple(value.shape)) for meta, value in pairs]


def _of_eager(found: Reference) -> dict[str, torch.Tensor | None]:
    """Return eager's gradients of the loss, by parameter."""
    out = found.out
    match out:
        case (loss, Mapping()):
            pass
        case Mapping():
            loss = out["loss"]
        case _:
            loss = out if isinstance(out, torch.Tensor) else out.loss
    assert found.module is not None
    return gradients.of_sums([loss] if loss.requires_grad else [], found)
