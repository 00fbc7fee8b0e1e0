"""Code for torch_xla runs on one replica: its names, its semantics, and eager PyTorch's numbers."""

import importlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from jax.experimental.pallas.ops.tpu import flash_attention as jax_kernel
from torch import nn

import tpuport
from tpuport.compat.emulated.programs import PortWarning
from tpuport.foundation.errors import PortError, TpuportError, UsageError

# The public names of the wheel on PyPI, read from its syntax trees: what each module defines, and
# what each package's face re-exports.
NAMES = json.loads((Path(__file__).parent / "torch_xla_names.json").read_text())


@pytest.fixture
def xla():
    """A block in which torch_xla was imported."""
    with tpuport.porting(torch_xla={}) as run:
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as met
        import torch_xla.runtime as xr

        class Modules:
            face, model, runtime, metrics = torch_xla, xm, xr, met
            report = run.report

        yield Modules


# -- names -----------------------------------------------------------------------------------------


def test_every_public_name_is_there_or_refused_by_name(xla):
    assert NAMES["version"] == xla.face.__version__
    missing, silent, served = [], [], 0
    for name, listed in NAMES["modules"].items():
        module = importlib.import_module(name)
        for one in listed.split():
            value = getattr(module, one, missing)
            if value is missing:
                missing.append(f"{name}.{one}")
            elif type(value).__name__ == "Refused":
                try:
                    value()
                except PortError as error:
                    said = f"{name}.{one}" in str(error) and "What to do" in str(error)
                    silent += [] if said else [f"{name}.{one}"]
            else:
                served += 1
    assert missing == []
    assert silent == []
    assert served > 240


def test_what_is_refused_raises_at_its_use_and_not_at_its_import(xla):
    from torch_xla.core.xla_builder import create_builder
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    internal = importlib.import_module("torch_xla._internal.tpu")
    here = Path(__file__).name
    for use in (
        *(create_builder, lambda: create_builder.anything, lambda: xla.face._XLAC._xla_x()),
        lambda: internal.num_available_chips(),
    ):
        with pytest.raises(PortError, match=here):
            use()
    with pytest.raises(PortError, match="ZeroRedundancyOptimizer is not served"):

        class Own(ZeroRedundancyOptimizer):
            pass

    with pytest.raises(ImportError):
        from torch_xla.core.xla_model import no_such_name  # noqa: F401
    assert not hasattr(xla.model, "no_such_name")


OPTIONAL = """
try:
    import torch_xla
except ImportError:
    torch_xla = None
"""


def test_code_that_can_do_without_finds_it_only_when_other_code_cannot(monkeypatch, tmp_path):
    (tmp_path / "takes_it_if_there.py").write_text(OPTIONAL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)

    def found() -> list[bool]:
        sys.modules.pop("takes_it_if_there", None)
        module = importlib.import_module("takes_it_if_there")
        spec = importlib.util.find_spec("torch_xla")
        names = [d.metadata["Name"] for d in importlib.metadata.distributions()]
        return [module.torch_xla is not None, spec is not None, "torch_xla" in names]

    with tpuport.porting():
        assert found() == [False] * 3
        assert torch.zeros(1, device="cuda").device.type == "cuda"
        import torch_xla

        assert torch.zeros(1, device="cuda").device == torch_xla.device()
        assert found() == [True] * 3
    assert "torch_xla" not in sys.modules
    with tpuport.porting():
        assert found() == [False] * 3
        assert torch.zeros(1, device="xla").device.type == "cuda"
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
        assert found() == [True] * 3


def test_an_installed_package_is_not_asked(monkeypatch, tmp_path):
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").write_text("raise RuntimeError('the real one')")
    monkeypatch.syspath_prepend(tmp_path)
    with tpuport.porting():
        import torch_xla

        assert torch_xla.device().type == "xla"


# -- the device ------------------------------------------------------------------------------------


def test_the_device_is_the_accelerator(xla):
    device = xla.face.device()
    x = torch.arange(4.0, device="xla")
    assert (x.device, x.is_xla, x.is_cuda, x.type()) == (
        device,
        True,
        False,
        "torch.xla.FloatTensor",
    )
    assert x.to(device) is x
    assert (x + 1).device == x.cpu().to("xla:0").device == device
    assert (x.cpu().device.type, x.numpy is not None) == ("cpu", True)
    assert torch.Generator("xla").device == device
    with torch.device("xla"):
        assert torch.ones(2).device == device
    assert xla.model.xla_device() == xla.face.device(0) == xla.face.devices()[0]
    assert xla.face.device_count() == xla.runtime.global_device_count() == 1
    assert xla.runtime.global_runtime_device_count() == len(jax.devices())
    assert xla.model.xla_device_hw(device) == xla.runtime.device_type() == "CPU"
    with pytest.raises(UsageError, match="xla:1"):
        xla.face.device(1)
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


def test_variables_of_the_environment_are_honoured_or_named(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setenv("XLA_DISABLE_FUNCTIONALIZATION", "1")
    monkeypatch.setenv("XLACACHE_PATH", "/kept")
    with tpuport.porting():
        with pytest.warns(PortWarning) as said:
            import torch_xla.runtime as xr
        assert xr.device_type() == "TPU"
    text = "\n".join(str(one.message) for one in said)
    for words in ("PJRT_DEVICE=TPU", "XLA_DISABLE_FUNCTIONALIZATION", "--cache-dir /kept"):
        assert words in text
    monkeypatch.setenv("XLA_USE_BF16", "1")
    with tpuport.porting(), pytest.raises(PortError, match="XLA_USE_BF16=1"):
        import torch_xla  # noqa: F401


# -- training --------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches() -> list:
    generator = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(8, 4, generator=generator), torch.arange(8) % 3) for _ in range(4)]
    return [{"x": x, "names": ["a"], "y": (y, 1)} for x, y in pairs]


def trained(model: nn.Module, loader, step, device=None) -> tuple[list[float], dict]:
    model = model.to(device) if device is not None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []

    def one(batch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"][0])
        loss.backward()
        step(optimizer)
        return loss

    for batch in loader:
        losses.append(one(batch).item())
    return losses, {name: value.cpu().clone() for name, value in model.state_dict().items()}


def test_a_training_loop_has_eager_numbers_and_counts_its_steps(xla):
    from torch_xla.distributed.parallel_loader import MpDeviceLoader, ParallelLoader

    want, state = trained(net(), batches(), lambda o: o.step())
    for make in (
        lambda: MpDeviceLoader(batches(), "xla"),
        lambda: ParallelLoader(batches(), ["xla"]).per_device_loader("xla"),
    ):
        loader = make()
        assert len(loader) == 4
        got, ours = trained(net(), loader, xla.model.optimizer_step, xla.face.device())
        np.testing.assert_allclose(got, want, rtol=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)
    assert xla.report.step_marks == 2 * 6  # before each of five `next`, and at the end
    assert "12 step marks of torch_xla" in str(xla.report)
    assert xla.metrics.counter_value("MarkStep") == 12
    assert xla.metrics.counter_value("UncachedCompile") == 2
    assert xla.metrics.counter_value("CachedCompile") == 2 * 3
    assert xla.metrics.counter_value("no such counter") is None
    samples, total, each = xla.metrics.metric_data("CompileTime")
    assert (samples, len(each)) == (2, 2)
    assert total > 0
    assert "Counter: MarkStep\n  Value: 12" in xla.metrics.metrics_report()
    assert xla.metrics.executed_fallback_ops() == []
    xla.metrics.clear_all()
    assert xla.metrics.counter_names() == xla.metrics.metric_names() == []


def test_a_loader_keeps_the_structure_that_torch_xla_gives(xla):
    from torch_xla.distributed.parallel_loader import MpDeviceLoader, ParallelLoader

    (batch, *_) = MpDeviceLoader(batches(), "xla", batches_per_execution=3)
    assert batch["x"].device == xla.face.device()
    assert type(batch["y"]) is list
    assert batch["names"] == ["a"]
    assert xla.report.step_marks == 2  # in the third call of next, and at the end
    with pytest.raises(UsageError, match="expected one device"):
        ParallelLoader(batches(), ["xla:0", "xla:0"])
    with pytest.raises(KeyError, match="names"):
        next(iter(MpDeviceLoader(batches(), "xla", input_sharding={})))


def test_steps_run_closures_and_limit_programs(xla):
    calls = []
    model = net().to("xla").eval()

    def step(rows):
        xla.model.add_step_closure(calls.append, args=(rows,), run_async=rows == 3)
        return model(torch.ones(rows, 4, device="xla"))

    compiled = xla.face.compile(step, full_graph=True, max_different_graphs=2)
    for rows in (2, 2, 3):
        assert compiled(rows).shape == (rows, 3)
    assert calls == [2, 2, 3]
    with pytest.raises(UsageError, match="max_different_graphs=2"):
        compiled(5)
    with xla.face.step():
        xla.model.add_step_closure(calls.append, args=("late",))
    assert calls[-1] == "late"
    xla.model.mark_step()
    xla.face.sync(wait=True)
    assert xla.report.step_marks == 2 * 4 + 2 + 2

    @xla.face.compile()
    def decorated(x):
        return x + 1

    assert decorated(1) == 2


def test_amp_casts_as_cuda_with_bfloat16(xla):
    from torch_xla.amp import GradScaler, autocast, syncfree

    x = torch.ones(2, 4)
    model = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(x)
    model, x = model.to("xla"), x.to("xla")
    with autocast(xla.face.device()):
        got = model(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.cpu(), want)
    with torch.autocast("xla", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    with pytest.raises(UsageError, match=r"expected torch\.bfloat16"):
        autocast("xla", dtype=torch.float16)
    scaler = GradScaler()
    for kind in (syncfree.SGD, syncfree.Adam, syncfree.AdamW):
        before = model.weight.detach().clone()
        optimizer = kind(model.parameters(), lr=0.1)
        scaler.scale(model(x).sum()).backward()
        optimizer.step(found_inf=torch.tensor(1.0))
        assert torch.equal(model.weight, before)
        optimizer.step(found_inf=torch.tensor(0.0))
        assert not torch.equal(model.weight, before)


# -- replicas --------------------------------------------------------------------------------------


def test_collectives_of_one_replica(xla):
    import torch_xla.core.functions as xf

    xm, x = xla.model, torch.arange(6.0, device="xla").view(2, 3).requires_grad_()
    copies = {
        "all_reduce": xm.all_reduce("sum", x, scale=0.5),
        "all_gather": xm.all_gather(x, dim=-1, groups=[[0]]),
        "all_to_all": xm.all_to_all(x, 0, 1, 1),
        "permute": xm.collective_permute(x, [[0, 0]]),
        "function": xf.all_reduce("sum", x),
        "gathered": xf.all_gather(x),
        "scattered": xm.reduce_scatter("sum", x, 1.0, 0, 1),
        "list": xm.all_gather([x], pin_layout=False)[0],
        "buckets": xm.reduce_scatter_bucketized("sum", [x], 1.0, 0, 1)[0],
    }
    for name, value in copies.items():
        assert value is not x, name
        assert torch.equal(value, x), name
        assert torch.autograd.grad(value.sum(), x)[0].eq(1).all(), name
    assert torch.equal(xm.reduce_scatter("sum", x, 0.5, 0, 1), x * 0.5)
    assert torch.equal(xm.collective_permute(x, []), torch.zeros_like(x))
    out = torch.zeros(2, 3, device="xla")
    assert xm.all_gather(x, output=out) is out
    assert torch.equal(out, x)
    held = [x]
    assert xm.all_reduce("max", held) is held
    xm.collective_broadcast(held)
    xm.broadcast_master_param(net())
    assert xm.rendezvous("tag", b"payload") == [b"payload"]
    assert xm.do_on_ordinals(lambda a: a.device.type, (x,)) == "cpu"
    assert xm.do_on_ordinals(lambda: 1, ordinals=(3,)) is None
    assert xm.mesh_reduce("tag", {"a": 2}, lambda all_of: all_of) == [{"a": 2}]
    assert (xla.runtime.world_size(), xla.runtime.global_ordinal(), xm.get_ordinal()) == (1, 0, 0)


WRONG = {
    "replicas": (lambda xm, x: xm.all_reduce("sum", x, groups=[[0, 1]]), r"\[0, 1\]"),
    "kind": (lambda xm, x: xm.all_reduce("mean", x), "'mean' is no reduction"),
    "shards": (lambda xm, x: xm.reduce_scatter("sum", x, 1.0, 0, 2), "splits into 2 parts"),
    "split": (lambda xm, x: xm.all_to_all(x, 0, 0, 8), "splits into 8 parts"),
    "pairs": (lambda xm, x: xm.collective_permute(x, [[0, 1]]), r"\[1\]"),
    "root": (lambda xm, x: xm.collective_broadcast([x], 1), r"\[1\]"),
    "send": (lambda xm, x: xm.send(x, 0), "send is not served"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_collective_of_others_names_the_line(xla, case):
    call, words = WRONG[case]
    with pytest.raises(PortError, match=words) as error:
        call(xla.model, torch.ones(2, device="xla"))
    assert Path(__file__).name in str(error.value)


def test_a_program_may_hold_collectives(xla):
    class Reduces(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return xla.model.all_reduce("sum", x * self.weight) + xla.runtime.world_size()

    x = torch.arange(3.0)
    model = Reduces().to("xla")
    assert torch.equal(model(x.to("xla")).cpu(), x + 1)
    assert len(xla.report.programs) == 1


def test_one_process_runs_a_launched_function(xla, recwarn):
    import torch.distributed as dist
    import torch_xla.distributed.xla_backend  # noqa: F401
    import torch_xla.distributed.xla_multiprocessing as xmp

    calls = []
    xla.face.launch(lambda *args: calls.append(args), args=("a",))
    xmp.spawn(lambda *args: calls.append(args), args=("b",), nprocs=1)
    xmp.spawn(lambda *args: calls.append(args), nprocs=len(jax.devices()), start_method="fork")
    assert calls == [(0, "a"), (0, "b"), (0,)]
    assert len([one for one in recwarn if "one process runs" in str(one.message)]) == 2
    with pytest.raises(UsageError, match=r"nprocs=3.*8 devices"):
        xmp.spawn(lambda index: None, nprocs=3)

    def process(index):
        dist.init_process_group("xla", init_method="xla://")
        model = nn.parallel.DistributedDataParallel(net().to("xla"), gradient_as_bucket_view=True)
        calls.append((dist.get_backend(), dist.get_world_size(), model.module is not None))
        dist.destroy_process_group()

    xla.face.launch(process)
    assert calls[-1] == ("xla", 1, True)


# -- state -----------------------------------------------------------------------------------------


def test_random_numbers_go_on_from_their_state(xla):
    xm = xla.model
    xla.face.manual_seed(7)
    assert xm.get_rng_state() == 7
    first = torch.rand(3)
    state = xm.get_rng_state()
    assert isinstance(state, int)
    second = torch.rand(3, device="xla").cpu()
    xm.set_rng_state(state)
    assert torch.equal(torch.rand(3), second)
    xm.set_rng_state(7)
    with xm.fork_rng():
        torch.rand(5)
    assert torch.equal(torch.rand(3), first)


def test_saved_files_have_tensors_of_the_cpu(xla, tmp_path):
    import torch_xla.utils.serialization as xser

    model = net().to("xla")
    data = {"model": model.state_dict(), "epoch": 3, "rest": [(model[0].weight, "b")]}
    xla.model.save(data, tmp_path / "a.pt")
    xser.save(data, str(tmp_path / "b.pt"))
    for loaded in (torch.load(tmp_path / "a.pt"), xser.load(str(tmp_path / "b.pt"))):
        assert loaded["epoch"] == 3
        assert loaded["model"]["0.weight"].device.type == "cpu"
        assert torch.equal(loaded["model"]["0.weight"], model[0].weight.cpu())
        assert torch.equal(loaded["rest"][0][0], model[0].weight.cpu())
    assert model[0].weight.device.type == "xla"
    info = xla.model.get_memory_info()
    assert info["bytes_limit"] > info["bytes_used"] > 0


def test_helpers(xla, capsys):
    import torch_xla.debug.profiler as xp
    import torch_xla.test.test_utils as xtu
    import torch_xla.utils.utils as xu

    assert list(xu.SampleGenerator("s", 2)) == ["s", "s"]
    assert [y for _, y in xu.FnDataGenerator(torch.sum, 2, torch.ones, [3], 2)] == [6.0, 6.0]
    assert xu.flatten_nested_tuple([1, (2, [3])]) == (1, 2, 3)
    assert xu.shape([[1, 2], [3, 4]]) == [2, 2]
    tracker = xla.model.RateTracker()
    tracker.add(10)
    assert tracker.rate() > 0
    assert tracker.global_rate() > 0
    with xp.StepTrace("step", step_num=1), xp.Trace("part"):
        pass
    assert xla.report.step_marks == 1
    xla.model.master_print("hello", flush=True)
    xtu.print_training_update(xla.face.device(), 3, 0.5, 1.0, 2.0, epoch=1)
    said = capsys.readouterr().out
    assert "hello" in said
    assert "Epoch=1" in said
    assert "Loss=0.50000" in said


# -- experimental ----------------------------------------------------------------------------------


def test_scan_has_the_numbers_of_a_loop_that_writes_to_nothing(xla):
    from torch_xla.experimental.scan import scan

    def fn(carry, x):
        carry["sum"] += x["a"]
        return {"sum": carry["sum"]}, (carry["sum"], x["b"] * 2)

    def both(make):
        xs = {"a": torch.arange(1.0, 4.0), "b": torch.ones(3, 2)}
        xs = {name: make(x) for name, x in xs.items()}
        init = make(torch.zeros(()))
        return init, scan(fn, {"sum": init}, xs)

    init, (carry, (sums, twice)) = both(lambda t: t.to("xla"))
    assert init == 0
    assert carry["sum"] == 6
    assert sums.tolist() == [1, 3, 6]
    assert twice.shape == (3, 2)
    weight = torch.ones((), requires_grad=True)
    total, _ = scan(lambda c, x: (c * weight + x, x), torch.zeros(()), torch.arange(1.0, 4.0))
    assert torch.autograd.grad(total, weight)[0] == 1 * 2 + 2
    for xs, words in (((), "no tensors"), ((torch.ones(2), torch.ones(3)), "differ")):
        with pytest.raises(TpuportError, match=words):
            scan(fn, init, xs)


def test_layers_in_a_row_are_one_program(xla):
    from torch_xla.experimental.assume_pure import assume_pure
    from torch_xla.experimental.scan_layers import scan_layers

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return assume_pure(torch.tanh)(scan_layers(self.layers, x))

    model, x = Deep(), torch.randn(2, 4)
    want = model(x)
    torch.testing.assert_close(model.to("xla")(x.to("xla")).cpu(), want)
    assert len(xla.report.programs) == 1
    assert scan_layers([], x) is x


@pytest.mark.parametrize("case", ["plain", "causal", "segments", "bias"])
def test_flash_attention_is_that_of_jax(xla, case):
    from torch_xla.experimental.custom_kernel import flash_attention

    q, k, v = (torch.randn(2, 3, length, 8) for length in (5, 7, 7))
    options: dict = {"sm_scale": 0.3, "causal": case == "causal"}
    theirs = dict(options)
    if case == "segments":
        rows, columns = (
            torch.tensor([[0, 0, 1, 1, 9]] * 2),
            torch.tensor([[0, 1, 1, 1, 2, 2, 2]] * 2),
        )
        options |= {"q_segment_ids": rows, "kv_segment_ids": columns}
        theirs["segment_ids"] = jax_kernel.SegmentIds(rows.numpy(), columns.numpy())
    if case == "bias":
        options["ab"] = torch.randn(2, 3, 5, 7)
        theirs["ab"] = options["ab"].numpy()
    arrays = (x.numpy() for x in (q, k, v))
    with jax.default_matmul_precision("highest"):
        want = jax_kernel.mha_reference_no_custom_vjp(*arrays, **theirs)
    np.testing.assert_allclose(flash_attention(q, k, v, **options), want, rtol=1e-5, atol=1e-5)
