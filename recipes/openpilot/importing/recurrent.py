"""GRU and LSTM, step by step. The formulas are in https://onnx.ai/onnx/operators/onnx__GRU.html."""

from functools import partial
from typing import Any

import torch

from recipes.openpilot.importing.nodes import Built, Constant, Node, Operand, Variable, builds

_GATES = {"GRU": 3, "LSTM": 4}
_ACTIVATIONS = {"GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@builds("GRU", "LSTM")
def recurrent(node: Node) -> Built:
    """Build a GRU or LSTM in all directions, with the standard activations only."""
    x, op = node.variable(0), node.op
    directions = _DIRECTIONS[node.attr("direction", "forward")]
    wanted = _ACTIVATIONS[op] * len(directions)
    given = [str(name) for name in node.attr("activations") or wanted]
    odd = [n for n in ("clip", "layout", "input_forget") if node.attr(n)]
    if [n.lower() for n in given] != [n.lower() for n in wanted] or odd:
        raise node.refuse(f"activations {given} {' '.join(odd)}".rstrip())
    if node.input(4) is not None or node.input(7) is not None:
        raise node.refuse("sequence_lens or peepholes are given")
    hidden = node.attr("hidden_size")
    weights: list[Operand] = []
    for index in (1, 2, 3):
        value = node.input(index)
        if isinstance(value, Variable):
            raise node.refuse("its weights are computed from the inputs of the model")
        if isinstance(value, Constant):
            weights.append(node.register(value))
    has_bias = len(weights) == 3
    states: list[Operand] = []
    given_states = []
    for index in (5, 6)[: 2 if op == "LSTM" else 1]:
        value = node.input(index)
        given_states.append(value is not None)
        if isinstance(value, Variable):
            states.append(value.name)
        elif value is not None:
            if value.array.any():
                raise node.refuse("its first state is a constant that is not zero")
            given_states[-1] = False
    cell = partial(_gru, reset_after=bool(node.attr("linear_before_reset", 0)))
    call = partial(
        _recurrent,
        cell=_lstm if op == "LSTM" else cell,
        directions=directions,
        hidden=hidden,
        has_bias=has_bias,
        has_states=tuple(given_states),
    )
    return Built(call, [x.name, *weights, *states])


def _recurrent(
    x: torch.Tensor,
    *given: torch.Tensor,
    cell: Any,
    directions: tuple[bool, ...],
    hidden: int,
    has_bias: bool,
    has_states: tuple[bool, ...],
) -> tuple[torch.Tensor, ...]:
    """Compute (n, t, directions, b, hidden) from x (n, t, b, inputs), and the last states."""
    weights, states = list(given[: 2 + has_bias]), list(given[2 + has_bias :])
    first = [states.pop(0) if there else None for there in has_states]
    everything, last = [], []
    for number, backwards in enumerate(directions):
        w, r = weights[0][number], weights[1][number]
        halves = weights[2][number].chunk(2) if has_bias else (0.0, 0.0)
        zero = x.new_zeros(x.shape[0], x.shape[2], hidden)
        state = tuple(zero if f is None else f[:, number] for f in first)
        outs = []
        times = range(x.shape[1])
        for t in reversed(times) if backwards else times:
            state = cell(torch.matmul(x[:, t], w.T), r, halves, state)
            outs.append(state[0])
        everything.append(torch.stack(outs[::-1] if backwards else outs, dim=1))
        last.append(state)
    ends = [torch.stack([state[i] for state in last], dim=1) for i in range(len(has_states))]
    return (torch.stack(everything, dim=2), *ends)


def _gru(
    x: torch.Tensor, r: torch.Tensor, bias: Any, state: Any, reset_after: bool
) -> tuple[torch.Tensor, ...]:
    """Compute one step of a GRU, whose gates are z, r, h."""
    (h,) = state
    x, size = x + bias[0], h.shape[-1]
    with_bias = bias[1] if isinstance(bias[1], torch.Tensor) else x.new_zeros(3 * size)
    gates = torch.sigmoid(
        x[..., : 2 * size] + torch.matmul(h, r[: 2 * size].T) + with_bias[: 2 * size]
    )
    update, reset = gates.chunk(2, -1)
    last, last_bias = r[2 * size :].T, with_bias[2 * size :]
    if reset_after:
        new = torch.tanh(x[..., 2 * size :] + reset * (torch.matmul(h, last) + last_bias))
    else:
        new = torch.tanh(x[..., 2 * size :] + torch.matmul(reset * h, last) + last_bias)
    return ((1 - update) * new + update * h,)


def _lstm(x: torch.Tensor, r: torch.Tensor, bias: Any, state: Any) -> tuple[torch.Tensor, ...]:
    """Compute one step of an LSTM, whose gates are i, o, f, c."""
    h, c = state
    gates = x + torch.matmul(h, r.T) + bias[0] + bias[1]
    i, o, f, new = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(new)
    return torch.sigmoid(o) * torch.tanh(c), c
