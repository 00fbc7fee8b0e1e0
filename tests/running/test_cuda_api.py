"""`torch.cuda`, its memory, streams and random numbers, on the emulated device."""

import time

import jax
import numpy as np
import pytest
import torch

import tpuport
from tpuport.compat.emulated.accelerator import CAPABILITY
from tpuport.foundation.errors import UsageError


@pytest.fixture(autouse=True)
def _porting(request):
    if "_no_context" in request.fixturenames:
        yield
        return
    with tpuport.porting():
        yield


@pytest.fixture
def _no_context():
    """The test enters contexts of its own."""


def test_there_is_one_device():
    cuda = torch.cuda
    assert cuda.is_available()
    assert cuda.is_initialized()
    assert (cuda.device_count(), cuda.current_device()) == (1, 0)
    assert cuda.is_bf16_supported()
    assert cuda.get_device_name() == cuda.get_device_name(0) == jax.local_devices()[0].device_kind
    assert cuda.get_device_capability("cuda:0") == CAPABILITY == (8, 0)
    properties = cuda.get_device_properties(torch.device("cuda"))
    assert properties.name == jax.local_devices()[0].device_kind
    assert (properties.major, properties.minor) == CAPABILITY
    assert properties.total_memory > 1e8
    assert not cuda.can_device_access_peer(0, 0)
    assert torch.version.cuda is None
    cuda.init()
    cuda.set_device(0)
    cuda.set_device(torch.device("cuda:0"))
    with cuda.device(0), cuda.device("cuda"), cuda.device_of(torch.ones(1)):
        assert cuda.current_device() == 0


@pytest.mark.parametrize("call", ["set_device", "device", "get_device_name", "synchronize"])
def test_a_second_device_is_refused(call):
    with pytest.raises(UsageError, match="cuda:3 was asked for, but a process has one accelerator"):
        getattr(torch.cuda, call)(3)
    with pytest.raises(UsageError, match="expected a cuda device, got cpu"):
        getattr(torch.cuda, call)("cpu")


@pytest.mark.usefixtures("_no_context")
def test_a_version_of_cuda_can_be_named():
    with tpuport.porting(cuda_version="12.4"):
        assert torch.version.cuda.split(".") == ["12", "4"]
    assert torch.version.cuda is None


def test_memory_is_what_jax_says(monkeypatch):
    cuda = torch.cuda
    assert cuda.memory_allocated() == 0  # jax keeps no statistics of a CPU
    free, total = cuda.mem_get_info()
    assert 0 < free <= total == cuda.get_device_properties(0).total_memory
    now = {"bytes_in_use": 10, "peak_bytes_in_use": 30, "bytes_limit": 100}
    monkeypatch.setattr("tpuport.compat.emulated.accelerator.statistics", lambda: dict(now))
    assert (cuda.memory_allocated(), cuda.max_memory_allocated()) == (10, 30)
    assert cuda.mem_get_info() == (90, 100)
    assert cuda.memory_stats()["allocated_bytes.all.current"] == 10
    cuda.reset_peak_memory_stats()
    assert cuda.max_memory_allocated() == 10
    now["bytes_in_use"] = 20
    assert cuda.max_memory_allocated() == 20
    now["peak_bytes_in_use"] = 40
    assert cuda.max_memory_allocated() == 40
    assert "bytes_limit: 100" in cuda.memory_summary()
    cuda.empty_cache()
    cuda.ipc_collect()


def test_synchronize_waits_for_what_was_given_to_the_device():
    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 60, lambda _, y: y @ x / 500.0, x)

    x = jax.numpy.ones((500, 500))
    jax.block_until_ready(slow(x))
    y = slow(x)
    torch.cuda.synchronize()
    assert y.is_ready()


def test_events_measure_milliseconds():
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    time.sleep(0.05)
    end.record()
    torch.cuda.synchronize()
    assert 50 <= start.elapsed_time(end) < 5000
    assert end.query()
    with pytest.raises(UsageError, match="enable_timing=True"):
        start.elapsed_time(torch.cuda.Event())
    with pytest.raises(UsageError, match="record both events first"):
        start.elapsed_time(torch.cuda.Event(enable_timing=True))


def test_streams_are_one_queue():
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.nvtx.range("step"):
        x = torch.ones(3, device="cuda") * 2
    torch.cuda.current_stream().wait_stream(stream)
    event = stream.record_event()
    event.wait()
    event.synchronize()
    stream.synchronize()
    assert x.tolist() == [2, 2, 2]
    torch.cuda.nvtx.range_push("a")
    torch.cuda.nvtx.range_pop()
    torch.cuda.nvtx.mark("b")


def test_a_prefetcher_works():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(2).cuda(non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(torch.cuda.current_stream())
    assert x.sum() == 2


def test_a_device_by_number_is_the_accelerator():
    device = torch.device(0)
    torch.cuda.set_device(device)
    for x in (torch.ones(2).to(device), torch.zeros(2, device=device), torch.ones(2).to(0)):
        assert x.device == torch.device("cuda", 0)
    with pytest.raises(UsageError, match="cuda:1 was asked for"):
        torch.ones(2).to(torch.device(1))


def test_data_parallel_is_the_module_on_the_accelerator():
    model = torch.nn.DataParallel(torch.nn.Linear(2, 2)).cuda()
    x = torch.ones(3, 2)
    out = model(x)
    assert out.device == model.module.weight.device == torch.device("cuda", 0)
    expected = torch.nn.functional.linear(x.cuda(), model.module.weight, model.module.bias)
    torch.testing.assert_close(out, expected)
    with pytest.raises(UsageError, match="cuda:1 was asked for"):
        torch.nn.DataParallel(torch.nn.Linear(2, 2), device_ids=[0, 1])


def test_the_profiler_records_the_host(capfd):
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        torch.ones(3, device="cuda") + 1
    assert "aten::add" in {event.key for event in profile.key_averages()}
    assert "CUDA" not in capfd.readouterr().err


def test_checkpointed_blocks_draw_the_same_numbers_again():
    x = torch.ones(4, 64, device="cuda", requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(
        lambda t: torch.nn.functional.dropout(t, 0.5), x, use_reentrant=False
    )
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)
    assert (y == 0).any()


def test_seeds_start_the_numbers_again():
    draws = []
    for seed in (torch.manual_seed, torch.cuda.manual_seed, torch.cuda.manual_seed_all):
        seed(3)
        draws.append(torch.randn(4, device="cuda").tolist())
    assert draws[0] == draws[1] == draws[2]
    assert torch.cuda.initial_seed() == 3
    states = torch.cuda.get_rng_state_all()
    first = torch.rand(2, device="cuda").tolist()
    torch.cuda.set_rng_state_all(states)
    assert torch.rand(2, device="cuda").tolist() == first
    state = torch.cuda.get_rng_state(torch.device("cuda"))
    with torch.random.fork_rng(devices=[0]):
        torch.rand(2)
    assert torch.equal(torch.cuda.get_rng_state(), state)


class Seeded(torch.nn.Module):
    def forward(self, x):
        torch.cuda.manual_seed(5)
        a = torch.rand_like(x)
        torch.cuda.manual_seed_all(5)
        return a + x, torch.rand_like(x) + x


def test_a_seed_inside_a_ported_program_is_its_key():
    x = torch.zeros(4)
    ported = tpuport.convert(Seeded(), args=(x,), verify=False)
    state = torch.get_rng_state()
    first, second = ported(x)
    assert torch.equal(tpuport.to_torch(first).cpu(), tpuport.to_torch(second).cpu())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: torch.cuda.CUDAGraph(), "compiled once and launched as one"),
        (lambda: torch.cuda.make_graphed_callables(print, ()), "compiled once and launched"),
        (lambda: torch.cuda.cudart(), "no CUDA runtime library"),
        (lambda: torch.cuda.nccl.all_reduce([]), "shard the arrays over a mesh"),
        (lambda: torch.nn.parallel.comm.broadcast(None, [0]), "shard the arrays over a mesh"),
        (lambda: torch.cuda.get_stream_from_external(0), "does not emulate"),
    ],
)
def test_what_only_a_gpu_has_is_refused_at_the_users_line(call, message):
    with pytest.raises(UsageError, match=message) as info:
        call()
    assert "test_cuda_api.py" in str(info.value)


@pytest.mark.parametrize("name", ["CUDAGraph", "graph", "MemPool"])
def test_a_refused_class_is_a_class(name: str):
    refused = getattr(torch.cuda, name)
    assert (refused | None) == (None | refused)
    assert not isinstance(1, refused)


@pytest.mark.usefixtures("_no_context")
def test_afterwards_there_is_no_device_again():
    held = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    with tpuport.porting():
        kept = torch.cuda.is_available
        assert kept()
    assert {name: getattr(torch.cuda, name) for name in dir(torch.cuda)} == held
    # What user code imported inside it keeps.
    assert not kept()


def test_the_device_neutral_names_mean_the_same_device():
    neutral = torch.accelerator
    assert neutral.is_available()
    assert neutral.current_accelerator() == torch.device("cuda")
    assert (neutral.device_count(), neutral.current_device_index()) == (1, 0)
    assert neutral.memory_allocated() == torch.cuda.memory_allocated()
    assert torch.bfloat16 in neutral.get_device_capability()["supported_dtypes"]
    neutral.set_device_index(0)
    neutral.synchronize()
    with pytest.raises(UsageError, match="cuda:1 was asked for"):
        neutral.set_device_index(1)


def test_switches_can_be_set_and_change_nothing():
    q = torch.rand(1, 2, 4, 8, device="cuda")
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    torch.backends.cuda.enable_math_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
    assert not torch.backends.cuda.math_sdp_enabled()
    torch.set_float32_matmul_precision("high")
    assert torch.get_float32_matmul_precision() == "high"
    chosen = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION)
    with chosen, torch.backends.cuda.sdp_kernel(enable_math=False):
        got = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert torch.equal(got, expected)


@pytest.mark.usefixtures("_no_context")
def test_switches_are_forgotten_afterwards():
    with tpuport.porting():
        torch.set_float32_matmul_precision("medium")
    assert torch.get_float32_matmul_precision() == "highest"
    with tpuport.porting():
        assert torch.get_float32_matmul_precision() == "highest"


def test_the_old_tensor_types_make_and_name_tensors():
    x = torch.cuda.FloatTensor([1, 2])
    assert x.device == torch.device("cuda", 0)
    assert (x.dtype, x.tolist()) == (torch.float32, [1, 2])
    assert isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x, torch.cuda.LongTensor)
    assert not isinstance(torch.ones(1), torch.cuda.FloatTensor)
    assert torch.cuda.LongTensor(2, 3).shape == (2, 3)
    assert torch.cuda.LongTensor(np.int64(2), 3).shape == (2, 3)
    assert torch.cuda.BoolTensor([True]).dtype == torch.bool
    assert x.type() == "torch.cuda.FloatTensor"
    half = torch.ones(2).type(torch.cuda.HalfTensor)
    assert (half.dtype, half.device) == (torch.float16, x.device)
    assert half.type(torch.FloatTensor).device == torch.device("cpu")


class Positions(torch.nn.Module):
    """Counts up to a number that data decides, as allennlp does on a GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.max().item() + 1
        positions = torch.cuda.LongTensor(count, device=0).fill_(1).cumsum(0) - 1
        return (positions <= x[:, None]).sum(1)


def test_the_old_tensor_types_take_sizes_that_data_decides():
    for numbers in ([2, 3, 1], [5, 0]):
        x = torch.tensor(numbers, device="cuda")
        assert Positions().cuda()(x).tolist() == (x + 1).tolist()


@pytest.mark.usefixtures("_no_context")
def test_checkpoints_know_the_device_whatever_was_asked_before():
    kind = torch.utils.checkpoint.DefaultDeviceType
    before = kind.get_device_type()
    with tpuport.porting():
        assert kind.get_device_type() == "cuda"
        held = torch.utils.checkpoint.get_device_states(torch.ones(2, device="cuda"))
        first = torch.rand(3, device="cuda")
        torch.utils.checkpoint.set_device_states(*held)
        assert torch.equal(torch.rand(3, device="cuda"), first)
    assert kind.get_device_type() == before
