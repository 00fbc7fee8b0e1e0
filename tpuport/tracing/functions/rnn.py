"""LSTM, GRU and plain recurrent layers, as one `lax.scan` per layer and direction.

C++ would unroll the time steps into the program, which XLA then compiles one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpuport.foundation.interop import backend
from tpuport.tracing.core.autocast import autocast_dtype, cuda_is_on, to_autocast
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.values import flat, flow_of, value_of, wrap_as
from tpuport.tracing.dynamic_shapes.handlers import involved
from tpuport.tracing.functions import promotion
from tpuport.tracing.functions.registry import FUNCTIONS, Handler, traced
from tpuport.tracing.lowerings._numeric import is_low, wide

State = tuple[jax.Array, ...]
Cell = Callable[[jax.Array, State, "_Weights"], State]


@dataclass(frozen=True)
class _Weights:
    """The weights of one layer and direction.

    Input [G, I] and hidden [G, H] weights, their biases, and LSTM's projection [P, H].
    """

    inputs: jax.Array
    hidden: jax.Array
    input_bias: jax.Array | None = None
    hidden_bias: jax.Array | None = None
    projection: jax.Array | None = None

    def gates(self, x: jax.Array) -> jax.Array:
        """Return the inputs' part of the gates, for all steps at once."""
        y = x @ self.inputs.T
        return y if self.input_bias is None else y + self.input_bias

    def recurrent(self, h: jax.Array) -> jax.Array:
        """Return the state's part of the gates."""
        y = h @ self.hidden.T
        return y if self.hidden_bias is None else y + self.hidden_bias


@dataclass(frozen=True)
class _Options:
    """The arguments of the torch call besides tensors, in its order."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool


# -- cells -----------------------------------------------------------------------------------------


def _lstm_cell(gates: jax.Array, state: State, weights: _Weights) -> State:
    h, c = state
    i, f, g, o = jnp.split(wide(gates + weights.recurrent(h)), 4, -1)
    cell = jax.nn.sigmoid(f) * wide(c) + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = (jax.nn.sigmoid(o) * jnp.tanh(cell)).astype(c.dtype)
    if weights.projection is not None:
        hidden = hidden @ weights.projection.T
    return hidden, cell.astype(c.dtype)


def _gru_cell(gates: jax.Array, state: State, weights: _Weights) -> State:
    (h,) = state
    ir, iz, new = jnp.split(wide(gates), 3, -1)
    hr, hz, hn = jnp.split(wide(weights.recurrent(h)), 3, -1)
    reset, update = jax.nn.sigmoid(ir + hr), jax.nn.sigmoid(iz + hz)
    candidate = jnp.tanh(new + reset * hn)
    return (((wide(h) - candidate) * update + candidate).astype(h.dtype),)


def _plain_cell(activation: Callable[[jax.Array], jax.Array]) -> Cell:
    def cell(gates: jax.Array, state: State, weights: _Weights) -> State:
        (h,) = state
        return (activation(gates + weights.recurrent(h)),)

    return cell


CELLS: dict[str, Cell] = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": _plain_cell(jnp.tanh),
    "rnn_relu": _plain_cell(jax.nn.relu),
}


# -- layers ----------------------------------------------------------------------------------------


def _scan(
    cell: Cell,
    x: jax.Array,
    state: State,
    weights: _Weights,
    running: jax.Array | None,
    reverse: bool,
) -> tuple[jax.Array, State]:
    """Run one direction of one layer over x [T, B, I].

    `running` [T, B] says which rows a step updates; the others keep their state. None is all.
    """

    def step(state: State, now: Any) -> tuple[State, jax.Array]:
        gates, moving = now
        new = cell(gates, state, weights)
        if moving is not None:
            new = tuple(jnp.where(moving[:, None], n, s) for n, s in zip(new, state, strict=True))
        return new, new[0]

    last, out = lax.scan(step, state, (weights.gates(x), running), reverse=reverse)
    return out, last


def _run(
    cell: Cell,
    x: jax.Array,
    states: State,
    weights: Sequence[_Weights],
    options: _Options,
    running: jax.Array | None,
    dropped: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, State]:
    """Run all layers and directions; `states` are [layers * directions, B, H] each."""
    directions = 2 if options.bidirectional else 1
    ends: list[State] = []
    for layer in range(options.num_layers):
        outs = []
        for direction in range(directions):
            index = layer * directions + direction
            state = tuple(s[index] for s in states)
            out, end = _scan(cell, x, state, weights[index], running, direction == 1)
            outs.append(out)
            ends.append(end)
        x = outs[0] if directions == 1 else jnp.concatenate(outs, -1)
        if options.train and options.dropout > 0 and layer < options.num_layers - 1:
            x = dropped(x)
    return x, tuple(jnp.stack(parts) for parts in zip(*ends, strict=True))


def _grouped(params: Sequence[Any], has_biases: bool, projected: bool) -> list[_Weights]:
    """Group torch's flat list of parameters into one `_Weights` per layer and direction."""
    names = ["inputs", "hidden", *(["input_bias", "hidden_bias"] if has_biases else [])]
    names += ["projection"] if projected else []
    values = [value_of(p) for p in params]
    rows = [values[i : i + len(names)] for i in range(0, len(values), len(names))]
    return [_Weights(**dict(zip(names, row, strict=True))) for row in rows]


def _dropper(trace: Trace, probability: float) -> Callable[[jax.Array], jax.Array]:
    def drop(x: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(trace.next_key(None), 1.0 - probability, x.shape)
        if probability >= 1.0:
            return jnp.zeros_like(x)
        scaled = (wide(x) if is_low(x) else x) / (1.0 - probability)
        return jnp.where(kept, scaled, 0).astype(x.dtype)

    return drop


# -- the torch functions ---------------------------------------------------------------------------


def _handler(cell: Cell) -> Handler:
    def handle(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = flat(args, kwargs)
        concerned = any(traced(trace, t) is not None for t in tensors)
        if kwargs or not concerned or involved(args, kwargs):
            return NotImplemented
        if (dtype := autocast_dtype()) is not None:
            if not cuda_is_on():
                return NotImplemented  # a CPU casts within each step
            args = [_as_cudnn(arg, dtype) for arg in args]
        args = promotion.product(args)
        tensors = flat(tuple(args), kwargs)
        packed = isinstance(args[3], (list, tuple))
        if packed and traced(trace, args[1]) is not None:
            return NotImplemented
        run = _packed if packed else _padded
        return run(trace, cell, tensors, *args)

    return handle


def _as_cudnn(arg: Any, dtype: torch.dtype) -> Any:
    """Cast the input, the states and the weights, as cuDNN's autocast does for the whole layer."""
    if isinstance(arg, (list, tuple)):
        return type(arg)(_as_cudnn(one, dtype) for one in arg)
    return to_autocast(arg, dtype)


def _states(hx: Any) -> tuple[Any, ...]:
    return tuple(hx) if isinstance(hx, (list, tuple)) else (hx,)


def _is_projected(states: Sequence[Any]) -> bool:
    return len(states) == 2 and states[0].shape[-1] != states[1].shape[-1]


def _wrap(
    trace: Trace, tensors: list[torch.Tensor], out: jax.Array, meta: torch.Tensor, ends: State
) -> tuple[torch.Tensor, ...]:
    flow = flow_of(tensors)
    metas = [torch.empty(e.shape, dtype=meta.dtype, device="meta") for e in ends]
    states = [wrap_as(None, e, m, trace, flow) for e, m in zip(ends, metas, strict=True)]
    return (wrap_as(None, out, meta, trace, flow), *states)


def _padded(
    trace: Trace,
    cell: Cell,
    tensors: list[torch.Tensor],
    x: torch.Tensor,
    hx: Any,
    params: Sequence[torch.Tensor],
    *options: Any,
) -> tuple[torch.Tensor, ...]:
    """Run a batch of sequences of one length: [T, B, I], or [B, T, I] with batch_first."""
    *first, batch_first = options
    chosen = _Options(*first)
    states = _states(hx)
    weights = _grouped(params, chosen.has_biases, _is_projected(states))
    steps = value_of(x)
    steps = jnp.swapaxes(steps, 0, 1) if batch_first else steps
    start = tuple(value_of(s) for s in states)
    drop = _dropper(trace, chosen.dropout)
    out, ends = _run(cell, steps, start, weights, chosen, None, drop)
    meta = torch.empty(out.shape, dtype=x.dtype, device="meta")
    if batch_first:
        out, meta = jnp.swapaxes(out, 0, 1), meta.transpose(0, 1)
    return _wrap(trace, tensors, out, meta, ends)


def _packed(
    trace: Trace,
    cell: Cell,
    tensors: list[torch.Tensor],
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: Any,
    params: Sequence[torch.Tensor],
    *options: Any,
) -> tuple[torch.Tensor, ...]:
    """Run a `PackedSequence`: `data` [sum of batch_sizes, I] by steps, longest sequence first."""
    chosen = _Options(*options)
    states = _states(hx)
    weights = _grouped(params, chosen.has_biases, _is_projected(states))
    sizes = backend.to_numpy_array(batch_sizes)
    running = np.arange(sizes.max(initial=0)) < sizes[:, None]
    place = np.cumsum(running.reshape(-1)).reshape(running.shape) - 1
    flat = np.flatnonzero(running)

    def drop(x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])[flat]
        return _dropper(trace, chosen.dropout)(rows)[np.maximum(place, 0)]

    steps = value_of(data)[np.maximum(place, 0)]
    start = tuple(value_of(s) for s in states)
    out, ends = _run(cell, steps, start, weights, chosen, jnp.asarray(running), drop)
    rows = out.reshape(-1, out.shape[-1])[flat]
    meta = torch.empty(rows.shape, dtype=data.dtype, device="meta")
    return _wrap(trace, tensors, rows, meta, ends)


def _pack(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """Handle the C++ part of `pack_padded_sequence`: gather the rows that count, step by step.

    The batch sizes stay a host tensor.
    """
    x, lengths, batch_first = args
    if traced(trace, lengths) is not None:
        raise port_error(
            "the lengths of packed sequences depend on the program's inputs",
            code="TPU203",
            remedy=(
                "pass them as a list of Python numbers (each list is a program of its own), or run"
                " the padded batch and select what each sequence needs"
            ),
        )
    if traced(trace, x) is None:
        return NotImplemented
    counts = backend.to_numpy_array(lengths)
    if (counts <= 0).any() or (np.diff(counts) > 0).any():
        # torch raises here, and says which of the two it is.
        torch._VF._pack_padded_sequence(torch.empty(x.shape), lengths, batch_first)
    running = np.arange(counts.max())[:, None] < counts
    value = value_of(x)
    value = jnp.swapaxes(value, 0, 1) if batch_first else value
    rows = value[: len(running)].reshape(-1, *value.shape[2:])[np.flatnonzero(running)]
    meta = torch.empty(rows.shape, dtype=x.dtype, device="meta")
    data = wrap_as(None, rows, meta, trace, flow_of([x]))
    return data, torch.from_numpy(running.sum(1).astype(np.int64))


def _unpack(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """Handle the C++ part of `pad_packed_sequence`: rows back in [T, B, ...], the rest filled.

    The lengths are a host tensor.
    """
    data, batch_sizes, batch_first, padding_value, total_length = args
    if traced(trace, data) is None or traced(trace, batch_sizes) is not None:
        return NotImplemented
    sizes = backend.to_numpy_array(batch_sizes)
    running = np.arange(sizes.max(initial=0)) < sizes[:, None]
    place = np.maximum(np.cumsum(running.reshape(-1)).reshape(running.shape) - 1, 0)
    value = value_of(data)
    kept = running.reshape(running.shape + (1,) * (value.ndim - 1))
    padded = jnp.where(kept, value[place], jnp.asarray(padding_value, value.dtype))
    if total_length > len(running):
        missing = [(0, total_length - len(running))] + [(0, 0)] * (padded.ndim - 1)
        padded = jnp.pad(padded, missing, constant_values=padding_value)
    meta = torch.empty(padded.shape, dtype=data.dtype, device="meta")
    if batch_first:
        padded, meta = jnp.swapaxes(padded, 0, 1), meta.transpose(0, 1)
    lengths = torch.from_numpy(running.sum(0).astype(np.int64))
    return wrap_as(None, padded, meta, trace, flow_of([data])), lengths


FUNCTIONS[torch._VF._pack_padded_sequence] = _pack
FUNCTIONS[torch._VF._pad_packed_sequence] = _unpack
for _name, _cell in CELLS.items():
    FUNCTIONS[getattr(torch, _name)] = _handler(_cell)
