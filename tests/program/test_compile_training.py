"""A step that `make_train_step` made, compiled for a TPU that is not there."""

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from jax.sharding import Mesh

import tpuport
from tests.program.small import BATCH, WIDTH, Block, Small, batch, needs_libtpu, on_meta, squared
from tpuport.foundation.errors import UsageError
from tpuport.training import from_torch, make_train_step

# Two matrices are spread over four chips, the rest is whole.
SPREAD, WHOLE = 2 * WIDTH * WIDTH * 4, (2 * WIDTH + 8 * WIDTH + 8) * 4
PARAMETERS = SPREAD // 4 + WHOLE


def loss(model: Any, x: torch.Tensor) -> Any:
    out = (model(x) ** 2).mean()
    return out, {"size": out.sqrt()}


class Deep(torch.nn.Module):
    """Blocks that become one loop on a TPU."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def everything(ported: Any) -> Any:
    return make_train_step(ported, loss, accumulate=4, clip_norm=1.0, ema_decay=0.99)


@pytest.fixture(scope="module")
def compiled() -> tpuport.CompileReport:
    return tpuport.compile_for(everything(on_meta()), "v6e-4", inputs=batch())


@needs_libtpu
def test_a_step_is_compiled_with_all_that_it_does(compiled: tpuport.CompileReport):
    memory = compiled.memory
    assert (compiled.what, compiled.optimizer, compiled.fits) == ("training step", "adamw", True)
    assert memory.parameters == memory.averages == PARAMETERS
    assert memory.optimizer == 2 * PARAMETERS + 4
    assert memory.parts()["averages"] == PARAMETERS
    # The state is overwritten: loss, norm, the metric and what was skipped are new.
    counters_and_key = 4 + 4 + 8
    held = memory.state + counters_and_key
    assert memory.state == 4 * PARAMETERS + 4 + WIDTH * 4
    assert held <= memory.aliased <= held + memory.padding
    assert memory.outputs <= 4 * 4096
    assert re.search(rf"averages\W+{PARAMETERS / 1024:.1f} KiB", str(compiled))
    assert tpuport.CompileReport.from_json(compiled.to_json()) == compiled


@needs_libtpu
def test_parts_of_a_batch_are_products_in_a_loop(compiled: tpuport.CompileReport):
    assert compiled.work is not None
    layers = 2 * WIDTH + 8
    assert compiled.work.model_flops == 2 * BATCH * WIDTH * (3 * layers - WIDTH)
    # Each part is a quarter of the batch, and there are four times as many products.
    assert sum(one.count for one in compiled.work.products) == 4 * 8


@needs_libtpu
def test_a_model_with_weights_gives_the_same_and_stays_as_it_is(compiled: tpuport.CompileReport):
    step = everything(tpuport.convert(Small()))
    report = tpuport.compile_for(step, "v6e-4", inputs=batch())
    assert report.memory == compiled.memory
    assert step.ported.sharding is None
    state, metrics = step(step.init(), torch.ones(BATCH, WIDTH))
    assert int(state.step) == 1
    assert set(metrics) == {"loss", "grad_norm", "skipped", "size"}


@needs_libtpu
def test_what_is_compiled_is_what_runs():
    """On CPU devices, which are there."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    step = everything(tpuport.convert(Small()))
    planned = tpuport.compile_for(step, mesh=mesh, inputs=batch(), kernel_times=False)
    tpuport.shard(step.ported, mesh, "fsdp")
    state, _ = step(step.init(), torch.ones(BATCH, WIDTH))
    (program,) = step._programs.values()
    # One that runs says in the program where its state goes.
    assert len(program.run.jaxpr.eqns) - len(jax.tree.leaves(state)) == planned.equations


@needs_libtpu
def test_repeated_blocks_and_groups_of_torch_are_stacked():
    with torch.device("meta"):
        model = Deep()
    ported = tpuport.convert(model)
    optimizer = from_torch(ported, torch.optim.AdamW(model.parameters(), lr=1e-3))
    report = tpuport.compile_for(
        make_train_step(ported, loss, optimizer), "v6e-4", inputs=batch(), kernel_times=False
    )
    assert report.optimizer == "of your own"
    # Two moments, and a count of steps for each parameter or stack.
    assert report.memory.optimizer == 2 * report.memory.parameters + 4 * 4
    # Patterns name the parameters of each block, which are one stack by then.
    chosen = make_train_step(ported, loss, optimizer, trainable=["blocks.**", "**"])
    again = tpuport.compile_for(chosen, "v6e-4", inputs=batch(), kernel_times=False)
    assert again.memory == report.memory
    groups = [{"params": list(model.blocks[i].parameters())} for i in range(3)]
    step = make_train_step(ported, loss, from_torch(ported, torch.optim.AdamW(groups)))
    with pytest.raises(UsageError, match=r"different groups of the AdamW .*stack=False"):
        tpuport.compile_for(step, "v6e-4", inputs=batch())


@needs_libtpu
def test_frozen_parameters_are_not_trained():
    with torch.device("meta"):
        model = Small()
    model.block.requires_grad_(False)
    step = make_train_step(tpuport.convert(model), loss, optax.sgd(0.1))
    memory = tpuport.compile_for(step, "v6e-4", inputs=batch(), kernel_times=False).memory
    head = (8 * WIDTH + 8) * 4
    assert (memory.parameters, memory.optimizer, memory.averages) == (head, 0, 0)
    assert memory.buffers == PARAMETERS - head + WIDTH * 4


@pytest.mark.parametrize("more", [{"train": True}, {"optimizer": "sgd"}, {"method": "loss"}])
def test_a_step_says_itself_what_it_is(more: dict[str, Any]):
    with pytest.raises(UsageError, match="leave train=, optimizer= and method= out"):
        tpuport.compile_for(everything(on_meta()), "v6e-4", inputs=batch(), **more)


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(UsageError, match="a batch of 6 cannot be cut into 4 equal parts"):
        tpuport.compile_for(everything(on_meta()), "v6e-4", inputs=batch(6))


class HookedAtFirst(Small):
    """Puts a hook on at its first call."""

    ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.head.register_forward_hook(lambda module, args, out: out * 2)
            self.ready = True
        return super().forward(x)


@needs_libtpu
def test_a_model_that_sets_itself_up_is_compiled_as_its_first_call_leaves_it():
    with torch.device("meta"):
        model = HookedAtFirst()
    ported = tpuport.convert(model)
    report = tpuport.compile_for(
        ported, "v6e-4", inputs=batch(), train=squared, kernel_times=False, quick=True
    )
    assert (report.fits, report.quick) == (True, True)
    assert not ported.module.ready
    assert not ported.module.head._forward_hooks  # type: ignore[union-attr]
