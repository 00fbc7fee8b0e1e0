"""A port that nobody holds any more is freed, with its weights."""

import gc
import weakref
from typing import Any

import jax
import torch
from torch import nn

import tpuport


class Reordered(nn.Module):
    """Puts the valid rows of each example first, by which a trace is begun again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        valid = y[..., 0] > 0
        rows = []
        for i in range(2):
            first = valid[i]
            rows.append(torch.cat([y[i][first], torch.zeros_like(y[i][~first])]))
        return torch.stack(rows)


def traced() -> weakref.ref[Any]:
    """A port that was traced."""
    ported = tpuport.convert(Reordered(), verify=False)
    shape = jax.ShapeDtypeStruct((2, 6, 8), "float32")

    def call(params: Any, buffers: Any, x: Any) -> Any:
        return ported.apply(params, buffers, None, x)[0]

    jax.eval_shape(call, ported.params, ported.buffers, shape)
    return weakref.ref(ported)


def test_attempts_of_a_trace_hold_no_model():
    found = []
    for _ in range(3):
        found.append(traced())
    gc.collect()
    assert [port() for port in found] == [None] * 3
