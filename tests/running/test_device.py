"""The emulated accelerator: CUDA's meaning of device, copy and view on CPU tensors."""

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpuport
from tpuport.compat.emulated.device import emulated, set_default
from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.device_mark import is_tagged, mark_of

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _inside():
    with emulated():
        yield


MADE = {
    "factory": lambda x: torch.zeros(2, device="cuda"),
    "index": lambda x: torch.zeros(2, device=0),
    "tensor": lambda x: torch.tensor([1.0], device=torch.device("cuda")),
    "from a tensor's device": lambda x: torch.arange(3, device=x.device),
    "like": torch.zeros_like,
    "new": lambda x: x.new_zeros(3),
    "sum": lambda x: x.sum(),
    "with a host number": lambda x: x * torch.tensor(2.0),
    "view": lambda x: x[1:],
    "data": lambda x: x.data,
    "list": lambda x: torch.stack([x, x]),
    "one of several": lambda x: x.split(1)[1],
    "named tuple": lambda x: x.max(0).values,
    "dtype": lambda x: x.to(torch.float64),
    "dtype by a type of Python": lambda x: x.to(int),
    "half": lambda x: x.half(),
    "string type": lambda x: torch.zeros(2).type("torch.cuda.DoubleTensor"),
    "like another": lambda x: torch.zeros(2).to(x),
    "type_as": lambda x: torch.zeros(2, dtype=torch.int64).type_as(x),
    "deepcopy": copy.deepcopy,
    "gradient": lambda x: torch.autograd.grad((x.requires_grad_() ** 2).sum(), x)[0],
    "array": lambda x: torch.as_tensor(np.zeros(3), device="cuda"),
    "parameter": lambda x: nn.Parameter(torch.zeros(2)).cuda(),
    "under a device": lambda x: under_device(),
}


def under_device() -> torch.Tensor:
    with torch.device("cuda"):
        return nn.Linear(2, 2).weight


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_it_is_on_the_accelerator(make):
    made = make(torch.zeros(3, device="cuda"))
    assert made.device == CUDA
    assert made.is_cuda
    assert not made.is_cpu
    assert made.get_device() == 0
    assert made.type().startswith("torch.cuda.")


HOST = {
    "factory": lambda x: torch.zeros(2),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.float64),
    "explicit": lambda x: torch.zeros_like(x, device="cpu"),
    "target of a copy": lambda x: torch.zeros(3).copy_(x),
    "view with its shape": lambda x: torch.zeros(1).expand_as(x),
    "meta": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("make", HOST.values(), ids=HOST)
def test_it_is_not(make):
    made = make(torch.zeros(3, device="cuda"))
    assert made.device.type in ("cpu", "meta")
    assert not made.is_cuda


def test_moving_copies_and_staying_does_not():
    host = torch.zeros(2)
    there = host.cuda()
    there.add_(1)
    assert host.tolist() == [0, 0]
    assert there.cuda() is there
    assert there.to("cuda:0") is there
    assert there.to(CUDA, torch.float32, non_blocking=True) is there
    back = there.cpu()
    back.add_(1)
    assert there.tolist() == [1, 1]
    assert host.cpu() is host


def test_a_module_moves_however_it_is_told_to():
    ways = [((), {"device": "cuda"}), ((), {"device": CUDA, "dtype": torch.float64}), ((0,), {})]
    for args, kwargs in ways:
        moved = nn.Linear(2, 2).to(*args, **kwargs)
        assert moved.weight.device == CUDA
        assert moved.weight.dtype == kwargs.get("dtype", torch.float32)
        assert moved.to(device="cpu").weight.device.type == "cpu"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_module_with_whole_numbers_changes_its_dtype_where_it_is(device):
    moved = nn.BatchNorm1d(2).to(device).to(dtype=torch.float64).to(torch.float32)
    assert [(t.device.type, t.dtype) for t in (moved.weight, moved.num_batches_tracked)] == [
        (device, torch.float32),
        (device, torch.int64),
    ]


def test_an_array_is_copied_to_the_accelerator_not_aliased():
    array = np.zeros(2)
    there = torch.as_tensor(array, device="cuda")
    there += 1
    assert array.tolist() == [0, 0]


def test_a_module_moves_in_place_and_trains_there():
    model = nn.Linear(3, 1)
    before = model.state_dict()["weight"]
    weight = model.weight
    assert model.cuda() is model
    assert model.weight is weight
    assert weight.is_leaf
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    assert weight.grad.device == CUDA
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].device == CUDA
    # What was read before the move is another memory, as on CUDA.
    assert not torch.equal(before, weight)


def test_a_backward_pass_runs_user_code_on_the_accelerator():
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.zeros(2, device=CUDA).device)
            return grad * torch.tensor(2.0, device=CUDA)

    def block(x):
        seen.append(x.device)
        return x * torch.ones(2, device="cuda")

    with tpuport.porting(port_modules=False):
        x = torch.ones(2, device="cuda", requires_grad=True)
        y = checkpoint(block, Twice.apply(x), use_reentrant=False)
        y.sum().backward()
        assert x.grad.tolist() == [2, 2]
        assert x.grad.device == CUDA
    assert seen == [CUDA] * 3


WRITES = {
    "method": lambda p: p.data.add_(1),
    "operator": lambda p: p.data.__iadd__(1),
    "item": lambda p: p.data.__setitem__(0, 1),
    "out": lambda p: torch.add(p.data, 1, out=p.data),
    "initialiser": nn.init.ones_,
    "foreach": lambda p: torch._foreach_add_([p.data], 1.0),
    "view": lambda p: p.data[1:].zero_(),
    "inplace": lambda p: nn.functional.relu(p.data, inplace=True),
    "numpy view of the copy": lambda p: None,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_are_counted_though_the_version_does_not_see_them(write):
    parameter = nn.Parameter(torch.zeros(2)).cuda()
    before = mark_of(parameter).writes
    write(parameter)
    wrote = write is not WRITES["numpy view of the copy"]
    assert (mark_of(parameter).writes > before) is wrote


def test_reading_is_not_writing():
    x = torch.zeros(2, device="cuda")
    before = mark_of(x).writes
    _ = x + 1, x.sum(), x.clone(), torch.zeros(2).copy_(x), x.cpu(), x.requires_grad
    assert mark_of(x).writes == before


def test_values_leave_by_way_of_the_host_only():
    x = torch.zeros(2, device="cuda")
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        x.numpy()
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        np.asarray(x)
    assert x.cpu().numpy().tolist() == [0, 0]


def test_a_second_accelerator_is_refused():
    with pytest.raises(UsageError, match="a process has one accelerator, cuda:0"):
        torch.zeros(2, device="cuda:1")
    with pytest.raises(UsageError, match="not an accelerator"):
        torch.zeros(2).cuda("cpu")


def test_the_default_device():
    set_default("cuda")
    assert torch.zeros(2).device == CUDA
    assert torch.zeros(2, device="cpu").device.type == "cpu"
    set_default(None)
    assert torch.zeros(2).device.type == "cpu"


def test_a_converted_model_sees_the_accelerator_in_eager_and_in_the_trace(capsys):
    class Where(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            print(x.device)  # noqa: T201
            mask = torch.ones(2, device=x.device).cuda()
            return x.to("cuda") * self.weight * mask.to(x.device, x.dtype)

    ported = tpuport.convert(Where().cuda())
    out = ported(torch.arange(2.0, device="cuda"))
    assert tpuport.to_torch(out).tolist() == [0, 1]
    assert set(capsys.readouterr().out.split()) == {str(CUDA)}


class ByItsBuffer(nn.Module):
    """Reads a buffer as a number, after which the program has it as a constant."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.tensor(2))
        self.register_buffer("scale", torch.tensor([3.0]))

    def forward(self, x):
        x = x.view(int(self.rows), -1)
        places = {str(b.device) for b in self.buffers()} | {str(x.device)}
        if len(places) > 1 or not self.scale.is_cuda:
            raise RuntimeError(f"the module is on {places}")
        return x * self.scale.to(x.device)


def test_a_buffer_that_code_reads_as_a_number_stays_on_the_accelerator():
    x = torch.arange(6.0, device="cuda")
    net = ByItsBuffer().cuda()
    ported = tpuport.convert(net)
    for _ in range(2):
        assert torch.equal(tpuport.to_torch(ported(x)), net(x).cpu())


def test_nothing_stays_behind():
    x = torch.zeros(2, device="cuda")
    assert is_tagged(x)
    with emulated(), emulated():
        pass
    assert x.device == CUDA


def test_leaving_out_of_order_takes_only_our_own_mode_away():
    class Other(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    depths = []

    def elsewhere():
        other = Other()
        with emulated():
            other.__enter__()
        depths.append(torch._C._len_torch_function_stack())
        other.__exit__(None, None, None)
        depths.append(torch._C._len_torch_function_stack())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert depths == [1, 0]


class MakesInside(nn.Module):
    """Calls functions that torch wrote in Python, which make tensors on their arguments' device."""

    def __init__(self):
        super().__init__()
        self.bags = nn.EmbeddingBag(8, 4, mode="sum")
        self.attention = nn.MultiheadAttention(4, 2, add_zero_attn=True, add_bias_kv=True)
        self.pool = nn.FractionalMaxPool2d(2, output_size=1)

    def forward(self, ids):
        x = self.bags(ids)
        y, weights = self.attention(x, x, x)
        row, column = torch.unravel_index(weights.argmax(), weights.shape)
        assert row.device == x.device
        return y * (row + column), self.pool(x[None, None]).shape[-1] * weights


def test_tensors_that_functions_of_torch_make_inside_are_on_the_accelerator():
    torch.manual_seed(0)
    eager, ids = MakesInside(), torch.tensor([[0, 1, 2], [5, 1, 7]])
    there = copy.deepcopy(eager)
    with tpuport.porting():
        found = there.to(CUDA)(ids.to(CUDA))
        sum(out.sum() for out in found).backward()
        assert all(out.is_cuda for out in found)
    expected = eager(ids)
    sum(out.sum() for out in expected).backward()
    for have, want in zip(found, expected, strict=True):
        torch.testing.assert_close(have.cpu(), want)
    for have, want in zip(there.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(have.grad.cpu(), want.grad)


class Padded(nn.Module):
    """Takes a size from lengths, and asks where they are."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, lengths):
        if lengths.device.type == "cpu":
            longest, there = int(lengths.numpy().max()), 0
        else:
            longest, there = int(lengths.max()), 1
        places = torch.arange(longest, device=lengths.device)
        return (x * self.scale)[:, places].sum(), there + 10 * lengths.is_cuda, places.is_cuda


def test_an_argument_that_python_reads_stays_where_the_caller_had_it():
    with tpuport.porting():
        net = Padded().cuda()
        for lengths in ([1, 3], [2, 4], [1, 3]):
            for place, seen in (("cuda", (11, True)), ("cpu", (0, False))):
                given, x = torch.tensor(lengths, device=place), torch.ones(2, 4, device="cuda")
                found, *where = net(x, given)
                assert tuple(where) == seen
                assert given.device.type == place
                assert found.item() == 2 * max(lengths)
