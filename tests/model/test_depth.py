"""What more blocks cost while a model is traced, in counts: nothing here looks at a clock."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tpuport
from tests.model.repeated import DIM, Stack, jaxpr_of, loops, x_of
from tests.model.repeated import Block as Plain
from tpuport.tracing.attention.masks.graph import Graph


def stacked(depth: int) -> Any:
    ported = tpuport.convert(Stack(Plain, depth), verify=False, blocks="scan")
    tpuport.stack_blocks(ported)
    jaxpr_of(ported, x_of())  # imports, and the first use of everything
    jax.clear_caches()
    return ported


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the calls of Python functions."""
    count = [0]

    def note(frame: Any, event: str, arg: Any) -> None:
        count[0] += event == "call"

    sys.setprofile(note)
    try:
        yield count
    finally:
        sys.setprofile(None)


def calls(depth: int) -> int:
    """How many it takes to trace a model with its blocks in a loop."""
    ported = stacked(depth)
    with counted() as count:
        jaxpr_of(ported, x_of())
    return count[0]


def test_another_block_takes_few_calls():
    added = (calls(12) - calls(4)) / 8
    # About 6,000; to trace the block inline takes 2,700.
    assert 0 < added < 6500


def equations(jaxpr: Any) -> int:
    inner = [getattr(p, "jaxpr", p) for e in jaxpr.eqns for p in e.params.values()]
    return len(jaxpr.eqns) + sum(equations(i) for i in inner if hasattr(i, "eqns"))


def test_a_deeper_program_has_no_more_equations():
    programs = [jaxpr_of(stacked(depth), x_of()) for depth in (4, 12)]
    assert [loops(one) for one in programs] == [[4], [12]]
    shallow, deep = (equations(one.jaxpr) for one in programs)
    assert shallow == deep


class Masked(Plain):
    """Attention with a mask that its model made of lengths."""

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        (mask,) = rest
        y = self.norm(x)[:, None]
        y = torch.nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=mask)
        return x + y[:, 0]


class MaskedStack(Stack):
    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        (lengths,) = rest
        seen = torch.arange(x.shape[1])[None] < lengths[:, None]
        mask = (seen[:, None, :] & seen[:, :, None])[:, None]
        for block in self.blocks:
            # What stands between blocks is no mask either.
            x = block(x, mask) * 2
        return self.head(x)


def test_masks_are_looked_for_once(monkeypatch: pytest.MonkeyPatch):
    walked: list[int] = []
    made = Graph._made
    monkeypatch.setattr(Graph, "_made", lambda *args: walked.append(1) or made(*args))
    counts = []
    for depth in (4, 12):
        ported = tpuport.convert(MaskedStack(Masked, depth), verify=False, blocks="scan")
        ported._reconfigure(target="tpu")
        x, lengths = torch.zeros(2, 256, DIM), torch.tensor([200, 256])
        walked.clear()
        with torch.no_grad():
            ported.eval_shape(x, lengths)
        counts.append(len(walked))
    # For a block: its own mask, the multiplication before it, and that a block gave its operand.
    shallow, deep = counts
    assert 0 < shallow
    assert deep - shallow <= 8 * 14, counts


def test_no_garbage_is_collected_while_a_model_is_traced(capsys: pytest.CaptureFixture[str]):
    class Asked(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print(gc.isenabled())  # noqa: T201
            return super().forward(x)

    make: Callable[[], Any] = lambda: tpuport.convert(Stack(Asked), verify=False)  # noqa: E731
    make()(x_of())
    assert set(capsys.readouterr().out.split()) == {"False"}
    assert gc.isenabled()
    gc.disable()
    try:
        make()(x_of())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_parts_of_a_stack_are_its_slices_to_every_transformation():
    from tpuport.tracing.scan_layers.unstack_p import parts_of

    x = jnp.arange(24.0).reshape(4, 3, 2)

    def weighed(parts: Any) -> Any:
        a, b, c, _ = parts
        return (a * b + jnp.sin(c)).sum()

    ours, plain = (lambda x: weighed(parts_of(x))), (lambda x: weighed(list(x)))
    assert np.allclose(ours(x), plain(x))
    for change in (
        lambda f: f,
        jax.grad,
        jax.hessian,
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: jax.vmap(f, 1),
        lambda f: jax.vmap(jax.grad(f), 2, 2),
        lambda f: lambda x: jax.jvp(f, (x,), (x + 1,)),
    ):
        got, want = (jax.jit(change(function))(x) for function in (ours, plain))
        assert jax.tree.all(jax.tree.map(np.allclose, got, want))
