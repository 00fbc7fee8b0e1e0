"""torch_xla's spmd on eight virtual devices: shardings reach the programs, and numbers stay."""

import functools

import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import tpuport
from tpuport.compat.emulated import programs
from tpuport.foundation.errors import PortError, TpuportError, UsageError


@pytest.fixture
def xs():
    """`torch_xla.distributed.spmd` in SPMD mode."""
    with tpuport.porting(torch_xla={}) as run:
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        xr.use_spmd()
        xs.run = run
        yield xs


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, inside=lambda t: t):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 8)
        self.inside = inside

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.inside(x))


def net(**options) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def train(model: nn.Module, xs_of=lambda x: x, steps: int = 3) -> tuple[list[float], dict]:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        x = xs_of(torch.randn(8, 16, generator=generator))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def same(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for ours, value in zip(got[1].values(), want[1].values(), strict=True):
        torch.testing.assert_close(ours, value, rtol=1e-4, atol=1e-6)


def specs() -> dict[str, P]:
    """How the one program's weights are spread."""
    (model,) = programs.programs()
    return {name: value.sharding.spec for name, value in model.params.items()}


def test_marked_weights_and_inputs_reach_the_program(xs):
    want = train(net())
    mesh = xs.Mesh(np.arange(8), (4, 2), ("data", "model"))
    model = net().to("xla")
    for block in model.blocks:
        assert xs.mark_sharding(block.up.weight, mesh, ("model", None)) is block.up.weight
        xs.mark_sharding(block.down.weight, mesh, (None, 1))

    def marked(x):
        x = x.to("xla")
        xs.mark_sharding(x, mesh, ("data", None))
        return x

    same(train(model, marked), want)
    assert len(xs.run.report.programs) == 1
    found = specs()
    assert found["blocks.0.up.weight"] == P("model")
    assert found["blocks.1.down.weight"] == P(None, "model")
    assert found["head.weight"] == P()
    (live,) = programs.programs()
    assert {len(value.sharding.device_set) for value in live.params.values()} == {8}
    # The optimizer's in-place update keeps the mark; the next call has the new values, spread.
    assert found["head.bias"] == P()


def test_arguments_are_split_on_the_devices(xs, monkeypatch):
    from tpuport.compat.emulated.spread import OnDevices

    given = []
    arguments = OnDevices.arguments
    monkeypatch.setattr(
        OnDevices,
        "arguments",
        lambda *args: given.append(arguments(*args)) or given[-1],
    )
    mesh = xs.get_1d_mesh("data")
    x = torch.randn(8, 16)
    want = net()(x)
    model, x = net().to("xla"), x.to("xla")
    xs.mark_sharding(x, mesh, ("data", None))
    torch.testing.assert_close(model(x).cpu(), want)
    (value,) = given[-1]
    assert value.sharding.spec == P("data")
    assert {shard.data.shape for shard in value.addressable_shards} == {(1, 16)}
    xs.clear_sharding(x)
    torch.testing.assert_close(model(x).cpu(), want)
    assert len(given[-1][0].sharding.device_set) == 1


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_mark_inside_of_a_module_is_a_constraint_of_its_program(xs, with_gradients):
    mesh = xs.Mesh(range(8), (8,), ("data",))
    mark = xs.mark_sharding_with_gradients if with_gradients else xs.mark_sharding
    want = train(net())
    model = net(inside=lambda t: mark(t, mesh, ("data", None))).to("xla")
    same(train(model, lambda x: x.to("xla")), want)
    (live,) = programs.programs()
    text = str(next(iter(live._cache.values())).run.jaxpr)
    assert "sharding_constraint" in text
    assert "'data'" in text


def test_fsdp_shards_the_longest_dim_and_wraps_what_the_policy_names(xs):
    from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
        SpmdFullyShardedDataParallel as FSDPv2,
    )

    want = train(net())
    xs.set_global_mesh(xs.Mesh(range(8), (8, 1), ("fsdp", "model")))
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FSDPv2(net(), auto_wrap_policy=policy)
    assert [type(one).__name__ for one in model.module.blocks] == [FSDPv2.__name__] * 2
    assert model.blocks[0].module.calls == 0
    spec = xs.ShardingSpec(xs.get_global_mesh(), ("fsdp", None))

    def marked(x):
        x = x.to("xla")
        spec.apply(x)
        return x

    same(train(model, marked), want)
    found = specs()
    assert found["_orig_module.blocks.0._orig_module.up.weight"] == P("fsdp")
    assert found["_orig_module.blocks.0._orig_module.down.weight"] == P(None, "fsdp")
    for wrong in (FSDPv2, lambda m: FSDPv2(m, extra_data_axis="dcn")):
        with pytest.raises(UsageError, match=r"wrapped already|no axis 'dcn'"):
            wrong(model if wrong is FSDPv2 else net())
    xs.set_global_mesh(xs.get_1d_mesh("data"))
    with pytest.raises(UsageError, match="no axis 'fsdp'"):
        FSDPv2(net())


def test_a_loader_shards_what_fits_its_spec(xs):
    import torch_xla.distributed.parallel_loader as pl
    import torch_xla.utils.utils as xu

    mesh = xs.get_1d_mesh("data")
    data = (torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64))
    spec = xs.ShardingSpec(mesh, ("data", None))
    ((x, y),) = pl.MpDeviceLoader(xu.SampleGenerator(data, 1), "xla", input_sharding=spec)
    from tpuport.compat.emulated.spread import sharding_of

    assert sharding_of(x).spec == P("data")
    assert sharding_of(y) is None
    assert sharding_of(x.clone()) is sharding_of(x[:4]) is None
    odd = xu.SampleGenerator((torch.zeros(6, 2),), 1)
    spec = xs.ShardingSpec(mesh, ("data", None), minibatch=True)
    with pytest.raises(PortError, match="8 devices have to divide the batch, which is 6"):
        list(pl.MpDeviceLoader(odd, "xla", input_sharding=spec))
    named = {"x": torch.zeros(8, 2), "y": torch.zeros(8)}
    shardings = {"x": spec, "y": xs.ShardingSpec(mesh, ("data",))}
    (batch,) = pl.MpDeviceLoader([named], "xla", input_sharding=shardings)
    assert [sharding_of(one).spec for one in batch.values()] == [P("data")] * 2


def test_a_launched_function_has_its_batches_split():
    torch.manual_seed(0)
    batches = [torch.randn(8, 16) for _ in range(3)]

    def train_on(model, loader):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for x in loader:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {name: value.cpu() for name, value in model.state_dict().items()}

    want = train_on(net(), batches)
    results = []
    with tpuport.porting():
        import torch_xla
        import torch_xla.distributed.parallel_loader as pl

        def process(index):
            model = net().to("xla")
            results.append(train_on(model, pl.MpDeviceLoader(batches, torch_xla.device())))
            (live,) = programs.programs()
            results.append({len(v.sharding.device_set) for v in live.params.values()})

        with pytest.warns(UserWarning, match=r"8 devices: world_size\(\) is 1"):
            torch_xla.launch(process)
    same(results[0], want)
    assert results[1] == {8}


WRONG = {
    "few ids": (lambda xs: xs.Mesh(range(4), (4,)), "jax has 8 devices"),
    "twice": (lambda xs: xs.Mesh([0] * 8, (8,)), "each of 0 to 7 once"),
    "shape": (lambda xs: xs.Mesh(range(8), (3, 2), ("a", "b")), "multiply to 6"),
    "names": (lambda xs: xs.Mesh(range(8), (4, 2), ("a",)), "a different name for each axis"),
    "same names": (lambda xs: xs.Mesh(range(8), (4, 2), ("a", "a")), "a different name"),
    "axis": (lambda xs: mark(xs, ("y", None)), "names the axis 'y'; the mesh has x"),
    "number": (lambda xs: mark(xs, (1, None)), "names the axis 1"),
    "rank": (lambda xs: mark(xs, ("x",)), "1 entries, and the tensor has 2 dims"),
    "used twice": (lambda xs: mark(xs, ("x", "x")), "uses an axis of the mesh twice"),
    "on the host": (lambda xs: mark(xs, ("x", None), device="cpu"), r"to\(torch_xla\.device"),
    "slices": (
        lambda xs: xs.HybridMesh(ici_mesh_shape=(4,), dcn_mesh_shape=(2,)),
        "leave dcn_mesh_shape out",
    ),
    "launch": (lambda xs: __import__("torch_xla").launch(print), "call the function itself"),
    "manual": (lambda xs: xs.enable_manual_sharding(torch.ones(2), ("x",)), "jax.shard_map"),
}


def mark(xs, spec, device="xla"):
    return xs.mark_sharding(torch.ones(8, 4, device=device), xs.get_1d_mesh("x"), spec)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_says_what_to_do(xs, case):
    call, words = WRONG[case]
    with pytest.raises(TpuportError, match=words):
        call(xs)


def test_marks_need_spmd_mode_and_one_order_of_devices(xs):
    t = torch.ones(8, 4, device="xla")
    xs.mark_sharding(t, xs.Mesh(range(8), (8,), ("x",)), ("x", None))
    turned = xs.Mesh(list(reversed(range(8))), (8,), ("x",))
    with pytest.raises(UsageError, match="in the same order"):
        xs.mark_sharding(t, turned, ("x", None))
    with tpuport.porting(torch_xla={}):
        from tpuport.compat.packages._torch_xla.state import STATE

        STATE.is_spmd = False
        with pytest.raises(PortError, match=r"outside of SPMD mode[\s\S]*use_spmd"):
            xs.mark_sharding(t, turned, ("x", None))


def test_meshes(xs):
    mesh = xs.Mesh([0, 1, 2, 3, 4, 5, 6, 7], (2, 4), ("x", "y"))
    assert mesh.size() == 8
    assert dict(mesh.shape()) == {"x": 2, "y": 4}
    assert mesh.get_logical_mesh().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (mesh.get_axis_name_idx("y"), mesh.get_axis_name_idx("z")) == (1, None)
    assert xs.Mesh.from_str(str(mesh)).shape() == mesh.shape()
    assert xs.Mesh.from_str("no mesh") is None
    hybrid = xs.HybridMesh(ici_mesh_shape=(4, 2), axis_names=("a", "b"))
    assert dict(hybrid.shape()) == {"a": 4, "b": 2}
    # An axis that does not divide its dim is left out: the numbers stay, and each device has all.
    assert mesh.sharding((("x", "y"), None), (8, 3)).spec == P(("x", "y"))
    assert mesh.sharding(("x", "y"), (8, 3)).spec == P("x")
