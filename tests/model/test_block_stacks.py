"""Weights of repeated blocks kept as one array each."""

from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tests.model.repeated import (
    DIM,
    Beside,
    Block,
    KeepsBeside,
    LastBeside,
    Stack,
    check,
    jaxpr_of,
    loops,
    x_of,
)
from tpuport.foundation.errors import UsageError
from tpuport.tracing.scan_layers import stacked_params


def stacked(ported: Any) -> dict[str, Any]:
    return stacked_params.stack(ported.params, stacked_params.stack_names(ported.module))


def test_stacked_weights_are_read_in_place():
    ported = tpuport.convert(Stack(Block), blocks="scan")
    y = ported(x_of())
    params = stacked(ported)
    assert params["blocks[0:5].up.weight"].shape == (5, 2 * DIM, DIM)
    assert stacked_params.unstack(params).keys() == ported.params.keys()
    out, _ = ported.apply(params, ported.buffers, None, x_of())
    assert jnp.allclose(out, y.jax(), atol=1e-6)
    program = jaxpr_of(ported, x_of(), params=params)
    assert loops(program) == [5]
    names = [e.primitive.name for e in program.jaxpr.eqns]
    assert "concatenate" not in names

    def loss(params: Any) -> Any:
        return (ported.apply(params, ported.buffers, None, x_of())[0] ** 2).sum()

    plain, of_stacks = (jax.jit(jax.grad(loss))(given) for given in (ported.params, params))
    for name, value in stacked_params.unstack(of_stacks).items():
        np.testing.assert_allclose(value, plain[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_only_neighbours_of_one_kind_are_stacked():
    class Other(Block):
        pass

    model = Stack(lambda i: Other(i) if i == 3 else Block(i), 8)
    model.blocks[7].up.weight.requires_grad_(False)
    names = stacked_params.stack_names(model)
    assert {name.partition(".")[0] for name in names} == {"blocks[0:3]", "blocks[4:7]"}


def test_shared_weights_are_not_stacked():
    model = Stack(Block)
    for block in model.blocks:
        block.up = model.blocks[0].up
    assert stacked_params.stack_names(model) == []
    check(model, x_of())


def test_a_ported_model_keeps_its_weights_stacked():
    model = Stack(Block)
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(parameter.dim() > 1)
    ported = tpuport.convert(model, blocks="scan")
    names = tpuport.stack_blocks(ported)
    assert "blocks[0:5].up.weight" in ported.params
    assert "blocks[0:5].up.bias" in ported.buffers
    assert set(names) <= {*ported.params, *ported.buffers}
    ported(x_of())
    ported.verify(x_of())
    assert any(record.path == "grad.blocks.3.up.weight" for record in ported.report.parity)
    assert set(ported.by_fqn()) == set(dict(model.named_parameters()))
    assert set(ported.frozen) == set(ported.buffers)
    back = ported.to_torch().state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(back[name], value), name


def test_stacking_is_the_last_step():
    ported = tpuport.convert(Stack(Block))
    tpuport.stack_blocks(ported)
    with pytest.raises(UsageError, match=r"loading weights: .* call tpuport.stack_blocks.* last"):
        ported.load(Stack(Block).state_dict())
    with pytest.raises(UsageError, match="spreading it over a mesh"):
        tpuport.shard(ported, {"fsdp": 8})


def test_stacks_on_a_mesh_have_no_axis_for_the_blocks():
    ported = tpuport.convert(Stack(Block), blocks="scan")
    tpuport.shard(ported, {"fsdp": 8}, {"**.up.weight": jax.sharding.PartitionSpec("fsdp")})
    tpuport.stack_blocks(ported)
    spec = ported.params["blocks[0:5].up.weight"].sharding.spec
    assert tuple(spec)[:2] == (None, "fsdp")
    ported(x_of())


def test_weights_that_change_in_a_call_change_in_their_stack():
    class Renormed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.up.weight.mul_(0.5)
            return super().forward(x)

    ported = tpuport.convert(Stack(Renormed), blocks="scan")
    tpuport.stack_blocks(ported)
    before = ported.params["blocks[0:5].up.weight"]
    ported(x_of())
    assert jnp.allclose(ported.params["blocks[0:5].up.weight"], before * 0.5)


def test_a_model_on_the_meta_device_stacks_shapes():
    with torch.device("meta"):
        model = Stack(Block)
    ported = tpuport.convert(model)
    tpuport.stack_blocks(ported)
    assert ported.params["blocks[0:5].up.weight"].shape == (5, 2 * DIM, DIM)
    assert ported.eval_shape(x_of()).shape == (2, 4, 3)


def test_without_gradients_nothing_is_taken_for_changed():
    ported = tpuport.convert(Stack(Block), blocks="scan")
    with torch.no_grad():
        ported(x_of())
        before = dict(ported.params)
        tpuport.stack_blocks(ported)
        program = jaxpr_of(ported, x_of())
    assert loops(program) == [5]
    assert "scatter" not in {e.primitive.name for e in program.jaxpr.eqns}
    for name, value in stacked_params.unstack(ported.params).items():
        assert np.array_equal(value, before[name]), name


def test_no_gradient_passes_a_block_that_runs_without():
    class Stopped(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = x
                for block in self.blocks:
                    y = block(y)
            return self.head(x + y)

    check(Stopped(Block), x_of())
    ported = tpuport.convert(Stopped(Block), blocks="scan", verify=False)

    def loss(x: Any) -> Any:
        return ported.apply(ported.params, ported.buffers, None, x)[0].sum()

    got = jax.jit(jax.grad(loss))(jnp.asarray(x_of().numpy()))
    assert jnp.allclose(got, ported.params["head.weight"].sum(0), atol=1e-6)


class InDict(nn.Module):
    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


@pytest.mark.parametrize("kind", ["sequential", "named", "dict"])
def test_blocks_that_no_list_with_a_name_of_its_own_holds(kind: str):
    torch.manual_seed(0)
    blocks = {name: Block() for name in ("first", "second", "third")}
    model: nn.Module
    if kind == "dict":
        model, names = InDict(blocks), {"blocks[first|second|third].up.weight"}
    elif kind == "named":
        model, names = nn.Sequential(OrderedDict(blocks)), {"[first|second|third].up.weight"}
    else:
        model, names = nn.Sequential(*blocks.values()), {"[0:3].up.weight"}
    ported = tpuport.convert(model, blocks="scan", verify=False)
    assert names <= set(tpuport.stack_blocks(ported))
    assert set(ported.by_fqn()) == set(dict(model.named_parameters()))
    torch.testing.assert_close(tpuport.to_torch(ported(x_of())), model(x_of()).detach())
    assert loops(jaxpr_of(ported, x_of())) == [3]


def test_a_name_that_no_stack_could_hold_stays_by_itself():
    model = nn.Sequential(OrderedDict({f"a|{i}": nn.Linear(3, 3) for i in range(3)}))
    assert stacked_params.stack_names(model) == []


def test_a_model_that_is_not_ported_has_nothing_to_stack():
    with pytest.raises(UsageError, match=r"takes what tpuport.convert gives; got a Linear"):
        tpuport.stack_blocks(nn.Linear(3, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "expected"),
    [(KeepsBeside(Beside), [5]), (LastBeside(Beside), [4])],
    ids=["of the last", "of the others"],
)
def test_a_stack_is_not_copied_for_what_nobody_reads(model: nn.Module, expected: list[int]):
    ported = tpuport.convert(model, blocks="scan", verify=False)
    params = stacked(ported)
    out, _ = ported.apply(params, ported.buffers, None, x_of())
    torch.testing.assert_close(tpuport.to_torch(out), model(x_of()), rtol=1e-4, atol=1e-5)
    assert loops(jaxpr_of(ported, x_of(), params=params)) == expected
