"""Eager PyTorch in float64 under the dtypes that its code asks for."""

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tpuport.foundation.errors import ParityError, PortError
from tpuport.model.parity.float64 import Float64


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def views_and_writes(x):
    y = x.clone()
    y[0] += 1
    y.view(-1)[::2].mul_(3)
    turned = y.t()
    turned += x.t() / 7
    y[:, 1] = y[:, 2].exp()
    return y


def read_back(x):
    y = x / 3
    if y.sum().item() > 0:
        y = y * y.max().item()
    y.numpy()[0, 0] = 2.0
    return y.masked_fill(y > 1, 0.1).cumsum(0)


def normalised(x):
    mean, var = x.new_zeros(4), x.new_ones(4)
    out = F.batch_norm(x, mean, var, training=True)
    return torch.cat([F.layer_norm(out, (4,)), mean[None], var[None]])


def attended(x):
    q = x.reshape(1, 1, -1, 4)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)[0, 0]


def differentiated(x):
    x = x.clone().requires_grad_()
    weight = nn.Parameter(torch.eye(4, dtype=x.dtype) / 3)
    (F.gelu(x @ weight).softmax(-1).log().mean() + weight.square().sum()).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return torch.cat([x.grad, weight.grad])


def conjugates_and_parts_written(x):
    z = torch.view_as_complex(x.reshape(6, 2, 2) / 3)
    z.conj()[0] = z[1] / 7
    z.conj().imag[:, 1] = x[:, 1] / 3
    torch._neg_view(z.real).mul_(x[:, :2] / 3)
    return torch.view_as_real(z.conj().resolve_conj())


@pytest.mark.parametrize(
    "program",
    [
        *(views_and_writes, read_back, normalised, attended, differentiated),
        conjugates_and_parts_written,
    ],
)
def test_results_are_those_of_float64(program):
    x = normal(6, 4)
    with Float64() as mode:
        seen = program(x)
    assert seen.dtype == torch.float32
    assert mode.narrow == {}
    torch.testing.assert_close(
        mode.value(seen), program(x.double()).double(), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(seen.double(), mode.value(seen), rtol=1e-6, atol=1e-6)


def test_casts_in_the_code_lose_nothing():
    x = normal(6, 4)
    with Float64() as mode:
        seen = (x.to(torch.bfloat16) * 3).half().float().sqrt()
    torch.testing.assert_close(mode.value(seen), (x.double() * 3).sqrt(), equal_nan=True)


@torch.library.custom_op("tpuport_test::only_float", mutates_args=())
def only_float(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise RuntimeError("float32 is expected")
    return x * 2


def test_an_op_without_float64_runs_as_it_is():
    x = normal(6, 4)
    with Float64() as mode:
        seen = only_float(x / 3) / 7
    assert mode.narrow == {"tpuport_test.only_float.default": "float32 is expected"}
    torch.testing.assert_close(mode.value(seen), x.double() / 3 * 2 / 7, rtol=1e-6, atol=0)


@pytest.mark.parametrize("errors", [1.0, 16.0])
def test_errors_have_the_size_of_rounding(errors):
    x = normal(64, 64)
    with Float64(errors, seed=1) as mode:
        seen = F.layer_norm(x @ x, (64,))
    truth = F.layer_norm(x.double() @ x.double(), (64,))
    error = (mode.value(seen) - truth).abs().max() / truth.abs().max()
    assert 3e-8 * errors < error < 3e-6 * errors


def test_exact_ops_get_no_errors():
    x = normal(6, 4)
    with Float64(16.0) as mode:
        seen = torch.cat([x[[2, 0]] - x[[2, 0]], x.flip(0) * 2]).clone()
    torch.testing.assert_close(
        mode.value(seen), torch.cat([torch.zeros(2, 4), x.flip(0) * 2]).double(), rtol=0, atol=0
    )


class Checked(nn.Module):
    """Weights that are below what float32 holds, as dispersion corrections have them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.exp(-200.0 * x.double().square())
        shares = (weights / weights.sum()).to(x.dtype)
        assert not shares.isnan().any(), "no share"
        return shares * x


def test_a_check_that_only_float64_passes_is_refused_by_its_line() -> None:
    x = torch.tensor([1.0, 1.1])
    with pytest.raises(PortError, match=r"assert not shares(?s:.*)jax_enable_x64") as caught:
        tpuport.convert(Checked())(x)
    assert "TPU105" in str(caught.value)
    assert "AssertionError: no share" in str(caught.value)
    assert str(caught.value).startswith(__file__)
    with jax.enable_x64(True):
        torch.testing.assert_close(tpuport.convert(Checked())(x).torch(), Checked()(x))


class Grid(nn.Module):
    """A place in float64 that Python compares, and a phase that float32 has too few bits for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("z", torch.tensor(0.01, dtype=torch.float64))
        self.register_buffer("turns", torch.tensor(1e9 + 0.1, dtype=torch.float64))
        self.fine = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.tensor(0.01 / 3, dtype=torch.float64) * 3
        if not torch.equal(self.z, z):
            raise ValueError(f"another place: {self.z.item()}")
        return x * (self.turns % 1.0).to(x.dtype) if self.fine else x * z


def test_state_that_jax_narrows_keeps_its_bits_for_python_and_eager_pytorch() -> None:
    x = torch.arange(3.0)
    ported = tpuport.convert(Grid())
    for factor in (1, 2):
        torch.testing.assert_close(ported(x * factor).torch(), Grid()(x * factor))
    assert ported.to_torch().z == Grid().z
    ported.buffers = {**ported.buffers, "turns": jax.numpy.float32(3.5)}
    assert ported.to_torch().turns == 3.5
    model = Grid()
    model.fine = True
    with pytest.raises(ParityError, match=r'JAX holds in 32 bits: jax.config.update\("jax_enable'):
        tpuport.convert(model)(x)


def test_errors_of_rounding_leave_infinities_as_they_are():
    x = normal(6, 5)
    masked = torch.where(x > 0, float("-inf"), x)
    for seed in range(4):
        mode = Float64(1.0, seed)
        with mode:
            logs = torch.log((x > 0) * 1.5)
            shares = (masked / 3).softmax(1).sum() + (masked.exp() / 3).cumsum(1)
        assert torch.equal(mode.value(logs).isinf(), x <= 0)
        assert mode.value(shares).isfinite().all()
