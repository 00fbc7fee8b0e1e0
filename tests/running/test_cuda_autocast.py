"""`torch.autocast("cuda")` on the emulated device: the dtypes and values that CUDA gives."""

import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tpuport
from tpuport.compat.emulated import autocast
from tpuport.compat.emulated.device import tag
from tpuport.foundation.errors import UsageError

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _porting():
    with tpuport.porting():
        yield


def on_cuda(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return tag(torch.rand(shape).to(dtype) + 0.1)


def published(macro: str) -> set[str]:
    """The names in one of the lists of the installed torch's own header."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text().replace("\\\n", "\n")
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", text, re.DOTALL)
    assert body
    names = re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
    return {f"{name}.{overload}" if overload else name for name, overload in names}


@pytest.mark.parametrize(
    ("macro", "names"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", autocast.LOWER_PRECISION),
        ("AT_FORALL_FP32", autocast.FLOAT32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", autocast.FLOAT32_RESULT),
        ("AT_FORALL_PROMOTE", autocast.WIDEST),
    ],
)
def test_the_lists_are_those_of_the_installed_torch(macro, names):
    assert published(macro) == set(names)


X, Y, LOW = (lambda: on_cuda(4, 4)), (lambda: on_cuda(4, 4)), (lambda: on_cuda(4, 4, dtype=BF16))
IMAGE = lambda dtype=F32: on_cuda(1, 2, 6, 6, dtype=dtype)  # noqa: E731

CASES = {
    "mm": (lambda a, b: a @ b, (X, Y), BF16),
    "mm of both": (lambda a, b: a @ b, (X, LOW), BF16),
    "linear": (lambda a, b: F.linear(a, b), (X, Y), BF16),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (X, Y), BF16),
    "addmm": (lambda a, b: torch.addmm(a, a, b), (X, Y), BF16),
    "prelu": (lambda a, b: F.prelu(a, b[0]), (X, Y), BF16),
    "conv2d": (lambda a, b: F.conv2d(a, b), (IMAGE, lambda: on_cuda(3, 2, 3, 3)), BF16),
    "sdpa": (
        F.scaled_dot_product_attention,
        tuple([lambda: on_cuda(1, 2, 4, 8)] * 3),
        BF16,
    ),
    "exp": (torch.exp, (LOW,), F32),
    "log": (torch.log, (LOW,), F32),
    "pow": (lambda a: a**2, (LOW,), F32),
    "rsqrt": (torch.rsqrt, (LOW,), F32),
    "softplus": (F.softplus, (LOW,), F32),
    "layer_norm": (lambda a: F.layer_norm(a, (4,)), (LOW,), F32),
    "rms_norm": (lambda a: F.rms_norm(a, (4,)), (LOW,), F32),
    "group_norm": (lambda a: F.group_norm(a, 2), (lambda: IMAGE(BF16),), F32),
    "mse_loss": (F.mse_loss, (LOW, LOW), F32),
    "smooth_l1": (F.smooth_l1_loss, (LOW, LOW), F32),
    "kl_div": (lambda a, b: F.kl_div(a, b, reduction="sum"), (LOW, LOW), F32),
    "upsample": (lambda a: F.interpolate(a, scale_factor=2), (lambda: IMAGE(BF16),), F32),
    "cdist": (torch.cdist, (LOW, LOW), F32),
    "softmax": (lambda a: a.softmax(-1), (LOW,), F32),
    "softmax given": (lambda a: torch.softmax(a, -1, dtype=BF16), (LOW,), BF16),
    "log_softmax": (lambda a: F.log_softmax(a, dim=-1), (LOW,), F32),
    "sum": (lambda a: a.sum(), (LOW,), F32),
    "sum of dims": (lambda a: a.sum(dim=(0, 1), keepdim=True), (LOW,), F32),
    "cumsum": (lambda a: a.cumsum(0), (LOW,), F32),
    "prod": (lambda a: a.prod(1), (LOW,), F32),
    "vector_norm": (torch.linalg.vector_norm, (LOW,), F32),
    "norm": (lambda a: a.norm(), (LOW,), F32),
    "norm of a dim": (lambda a: a.norm(2, dim=1, keepdim=True), (LOW,), F32),
    "normalize": (F.normalize, (LOW,), F32),
    "addcmul": (lambda a, b: torch.addcmul(a, b, b), (X, LOW), F32),
    "addcmul low": (lambda a, b: torch.addcmul(a, b, b), (LOW, LOW), BF16),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), (X, LOW), F32),
    "atan2": (torch.atan2, (LOW, X), F32),
    "relu is on no list": (F.relu, (LOW,), BF16),
    "mean is on no list": (lambda a: a.mean(), (LOW,), BF16),
    "add promotes by itself": (lambda a, b: a + b, (X, LOW), F32),
    "cat promotes by itself": (lambda a, b: torch.cat([a, b]), (X, LOW), F32),
    "batch_norm keeps its input's": (
        lambda a: F.batch_norm(a, tag(torch.zeros(2)), tag(torch.ones(2))),
        (lambda: IMAGE(BF16),),
        BF16,
    ),
    "float64 is left alone": (
        lambda a: a @ a,
        (lambda: on_cuda(4, 4, dtype=torch.float64),),
        torch.float64,
    ),
    "integers are left alone": (lambda a: (a > 0.5).sum(), (X,), torch.int64),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operation_runs_in_the_published_dtype(name):
    call, makers, expected = CASES[name]
    inputs = [make() for make in makers]
    with torch.autocast("cuda", dtype=BF16):
        out = call(*inputs)
    assert out.dtype == expected
    low = name in ("mm", "mm of both", "linear", "einsum", "addmm", "prelu", "conv2d", "sdpa")
    by_hand = [t.to(BF16) if low else t for t in inputs]
    if not low and expected is F32 and "given" not in name:
        by_hand = [t.float() for t in inputs]
    torch.testing.assert_close(out, call(*by_hand).to(expected), rtol=0, atol=0)


def test_cross_entropy_rounds_where_torch_does():
    # Its C++ asks log_softmax for the dtype of the input, which the policy leaves as asked.
    x, target = LOW(), tag(torch.arange(4))
    with torch.autocast("cuda", dtype=BF16):
        loss = F.cross_entropy(x, target)
    assert loss.dtype == F32
    logs = torch.log_softmax(x, -1, dtype=BF16)
    torch.testing.assert_close(loss, F.nll_loss(logs.float(), target), rtol=0, atol=0)


def test_a_tensor_on_the_host_is_not_cast():
    x = torch.rand(3, 3)
    with torch.autocast("cuda", dtype=BF16):
        assert (x @ x).dtype == F32
    with torch.autocast("cpu", dtype=BF16):
        assert (x @ x).dtype == BF16
    assert (x @ x).dtype == F32


def test_float16_becomes_bfloat16_unless_asked():
    x = on_cuda(3, 3)
    with torch.autocast("cuda"):
        assert torch.get_autocast_dtype("cuda") == BF16
        assert (x @ x).dtype == BF16
    assert torch.get_autocast_dtype("cuda") == torch.float16
    with tpuport.porting(autocast_float16="float16"), torch.autocast("cuda"):
        assert (x @ x).dtype == torch.float16
    with (
        tpuport.porting(autocast_float16="half"),
        pytest.raises(UsageError, match='autocast_float16 must be "bfloat16" or "float16"'),
    ):
        torch.autocast("cuda")


def test_regions_nest_and_decorate_and_answer():
    x = on_cuda(3, 3)

    @torch.autocast("cuda", dtype=BF16)
    def decorated():
        return x @ x

    assert decorated().dtype == BF16
    with torch.autocast("cuda", dtype=BF16):
        assert torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled()
        assert not torch.is_autocast_enabled("cpu")
        with torch.autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled("cuda")
            assert (x @ x).dtype == F32
        assert (x @ x).dtype == BF16
    assert (x @ x).dtype == F32
    assert torch.amp.is_autocast_available("cuda")
    with torch.autocast(torch.device(0).type, BF16, True):
        assert (x @ x).dtype == BF16
    with pytest.raises(TypeError, match="surprise"):
        torch.autocast("cuda", surprise=1)


def test_the_old_names_work():
    x = on_cuda(3, 3)
    with pytest.warns(FutureWarning):
        region = torch.cuda.amp.autocast(dtype=BF16)
    with region:
        assert (x @ x).dtype == BF16
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    try:
        assert (x @ x).dtype == BF16
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert (x @ x).dtype == F32


def test_gradients_come_in_the_dtype_of_the_weights():
    weight = tag(torch.rand(3, 3)).requires_grad_()
    x = on_cuda(2, 3)
    with torch.autocast("cuda", dtype=BF16):
        loss = F.linear(x, weight).softmax(-1)[:, 0].sum()
    loss.backward()
    got, weight.grad = weight.grad, None
    F.linear(x.to(BF16), weight.to(BF16)).float().softmax(-1)[:, 0].sum().backward()
    assert got.dtype == F32
    torch.testing.assert_close(got, weight.grad, rtol=0, atol=0)


def test_binary_cross_entropy_is_refused_as_on_cuda():
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(on_cuda(3), on_cuda(3))


def test_recurrent_layers_run_in_the_lower_precision():
    layer = torch.nn.LSTM(3, 5)
    for weight in layer.parameters():
        tag(weight)
    with torch.autocast("cuda", dtype=BF16):
        out, (h, c) = layer(on_cuda(4, 2, 3))
    assert out.dtype == h.dtype == c.dtype == BF16


class Recurrent(torch.nn.Module):
    def __init__(self, kind, packs):
        super().__init__()
        self.layer, self.packs = kind(3, 5, num_layers=2, bidirectional=True), packs

    def forward(self, x):
        """(T, 2, 3) to the outputs and the last hidden states."""
        if self.packs:
            x = torch.nn.utils.rnn.pack_padded_sequence(x, [len(x), len(x) - 7])
        with torch.autocast("cuda", dtype=BF16):
            out, last = self.layer(x)
        out = torch.nn.utils.rnn.pad_packed_sequence(out)[0] if self.packs else out
        return out, last[0] if isinstance(last, tuple) else last


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_a_recurrent_layer_is_a_loop_in_the_lower_precision(kind, packs):
    torch.manual_seed(0)
    net, x = Recurrent(kind, packs), torch.randn(24, 2, 3)
    for tensor in net.parameters():
        tag(tensor)
    expected = net(tag(x.clone()))
    cotangents = [torch.randn(e.shape) for e in expected]
    sum((e.float() * c).sum() for e, c in zip(expected, cotangents, strict=True)).backward()
    ported = tpuport.convert(net, verify=False)

    def loss(params, x):
        outs = ported.apply(params, ported.buffers, None, x)[0]
        weighed = zip(outs, cotangents, strict=True)
        return sum((o.astype("float32") * c.numpy()).sum() for o, c in weighed), outs

    step = jax.value_and_grad(loss, has_aux=True)
    (_, got), gradients = jax.jit(step)(ported.params, jnp.asarray(x.numpy()))
    # Eager PyTorch rounds each operation to the eight bits of bfloat16, the loop each step.
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == jnp.bfloat16
        assert theirs.dtype == BF16
        np.testing.assert_allclose(mine.astype("float32"), theirs.detach().float().cpu(), atol=3e-2)
    for name, parameter in net.named_parameters():
        assert gradients[name].dtype == jnp.float32
        want = parameter.grad.float().cpu()
        largest = want.abs().max().item()
        np.testing.assert_allclose(gradients[name], want, atol=5e-2 * largest)
    # The steps are rounds of a loop: unrolled, there are hundreds.
    assert str(jax.make_jaxpr(loss)(ported.params, jnp.asarray(x.numpy()))).count(" tanh ") < 20


class Double(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=F32)
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad * 2


def test_custom_functions_cast_their_inputs():
    with torch.autocast("cuda", dtype=BF16):
        assert Double.apply(on_cuda(3, dtype=BF16)).dtype == F32


def test_another_thread_is_not_cast():
    x, seen = on_cuda(3, 3), []
    with torch.autocast("cuda", dtype=BF16):
        thread = threading.Thread(target=lambda: seen.append((x @ x).dtype))
        thread.start()
        thread.join()
    assert seen == [F32]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3)
        self.norm = torch.nn.GroupNorm(2, 4)
        self.batch = torch.nn.BatchNorm2d(4)
        self.rnn = torch.nn.GRU(4, 4, batch_first=True)
        self.last = torch.nn.Linear(4, 3)

    def forward(self, x):
        with torch.autocast("cuda", dtype=BF16):
            a = self.norm(self.conv(x))
            a = self.batch(self.conv(x)) + a
            a = a.flatten(2).transpose(1, 2)
            a = F.scaled_dot_product_attention(a, a, a)
            a, _ = self.rnn(a)
            b = self.last(a)
            with torch.autocast("cuda", enabled=False):
                c = F.linear(b.float(), self.last.weight.T)
            return b, c, c.to(BF16).softmax(-1), Double.apply(b)


def test_a_ported_program_casts_as_eager_does():
    net, x = Net().eval(), torch.randn(2, 2, 5, 5)
    for tensor in [*net.parameters(), *net.buffers()]:
        tag(tensor)
    expected = net(tag(x.clone()))
    ported = tpuport.convert(net, verify=False)
    got = ported(x)
    assert [t.dtype for t in got] == [t.dtype for t in expected] == [BF16, F32, F32, F32]
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(
            tpuport.to_torch(mine).cpu().float(),
            theirs.detach().cpu().float(),
            rtol=3e-2,
            atol=3e-2,
        )


class Deep(torch.nn.Sequential):
    def forward(self, x):
        with torch.autocast("cuda", dtype=BF16):
            return super().forward(x).float()


def test_a_float32_result_is_compared_at_the_precision_that_it_was_computed_in():
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.SiLU()) for _ in range(6)]
    ported = tpuport.convert(Deep(*layers))
    out = tpuport.to_torch(ported(torch.randn(16, 64))).cpu()
    assert torch.equal(out, out.to(BF16).float())
    (record,) = (r for r in ported.report.parity if r.kind == "output")
    assert record.max_rel <= record.tolerance == 2e-2
    exact = tpuport.convert(torch.nn.Linear(3, 3))
    exact(torch.randn(2, 3))
    assert {r.tolerance for r in exact.report.parity} == {1e-4}


def test_a_region_around_a_ported_call_is_another_program():
    net = torch.nn.Linear(3, 3)
    ported = tpuport.convert(net, verify=False)
    x = torch.randn(2, 3)
    assert ported(x).dtype == F32
    with torch.autocast("cuda", dtype=BF16):
        assert ported(x).dtype == BF16
    with torch.autocast("cpu", dtype=BF16):
        assert ported(x).dtype == BF16
    assert ported(x).dtype == F32


def test_torch_has_its_own_kernels_again_afterwards():
    def registered() -> str:
        return torch._C._dispatch_dump("aten::mm") + torch._C._dispatch_dump("aten::softmax.int")

    autocast.KERNELS.release()
    before = registered()
    with tpuport.porting(), torch.autocast("cuda", dtype=BF16):
        assert registered() != before
    autocast.KERNELS.release()
    assert registered() == before
