"""GPTQ and AWQ against the papers' equations, the report's formats, and the search."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tpuport
from tpuport.foundation.errors import UsageError
from tpuport.quantization import QuantizationScheme, calibrate, exact_sums, search
from tpuport.quantization.error_feedback import awq, gptq
from tpuport.quantization.report import report_of
from tpuport.quantization.rounding import round_weight

F = torch.nn.functional


def correlated(rows: int, columns: int) -> torch.Tensor:
    """Return inputs whose channels depend on each other, some of them large."""
    mixed = torch.randn(rows, columns) @ torch.randn(columns, columns) / columns**0.5
    return mixed * torch.exp(torch.randn(columns))


def by_elimination(weight: np.ndarray, gram: np.ndarray, size: int, most: int) -> np.ndarray:
    """Round as the paper derives it: the inverse of what remains, by elimination, column by column.

    Source: Frantar et al., arXiv:2210.17323, equations 2 and 3.
    """
    scale = np.ones(len(weight))
    weight, hessian = weight.astype(np.float64).copy(), gram.astype(np.float64).copy()
    hessian += 0.01 * np.mean(np.diag(hessian)) * np.eye(len(hessian))
    inverse, rounded = np.linalg.inv(hessian), np.zeros_like(weight)
    for q in range(weight.shape[1]):
        if q % size == 0:
            scale = np.abs(weight[:, q : q + size]).max(1) / most
        rounded[:, q] = np.clip(np.round(weight[:, q] / scale), -most - 1, most) * scale
        change = (weight[:, q] - rounded[:, q]) / inverse[q, q]
        weight[:, q:] -= np.outer(change, inverse[q, q:])
        inverse -= np.outer(inverse[:, q], inverse[q]) / inverse[q, q]
    return rounded


@pytest.mark.parametrize(("columns", "group"), [(96, None), (192, 32), (192, 96)])
def test_gptq_is_the_papers_equations(columns: int, group: int | None):
    torch.manual_seed(0)
    weight, x = torch.randn(24, columns), correlated(300, columns)
    scheme = QuantizationScheme(4, 16, group=group, method="gptq")
    found = gptq(weight, x.t() @ x, scheme).weight()
    want = by_elimination(weight.numpy(), (x.t() @ x).numpy(), group or columns, 7)
    # A value between two codes may be rounded to either, and then the rest of its row differs.
    same = np.isclose(found.numpy(), want, rtol=1e-4, atol=1e-6).all(1)
    assert same.mean() >= 0.9
    plain = round_weight(weight, scheme).weight()
    errors = [float(((x @ (one - weight).t()) ** 2).sum()) for one in (found, plain)]
    assert errors[0] < 0.8 * errors[1]


def test_gptq_with_zero_points_and_dead_inputs_is_better_than_rounding():
    torch.manual_seed(0)
    weight, x = torch.randn(24, 64) + 0.3, correlated(300, 64)
    x[:, 5] = 0
    scheme = QuantizationScheme(4, 16, group=32, symmetric=False, method="gptq")
    codes = gptq(weight, x.t() @ x, scheme)
    assert codes.zero is not None
    assert codes.values.min() >= -8
    assert codes.values.max() <= 7
    errors = [
        float(((x @ (one.weight() - weight).t()) ** 2).sum())
        for one in (codes, round_weight(weight, scheme))
    ]
    assert errors[0] < 0.9 * errors[1]


def test_awq_has_the_least_error_among_powers():
    torch.manual_seed(0)
    weight, x = torch.randn(24, 64), correlated(300, 64)
    scheme = QuantizationScheme(4, 16, group=32, method="awq")
    factors = awq(weight, x.t() @ x, x.abs().sum(0), scheme)
    size = x.abs().mean(0)

    def error(factors: torch.Tensor) -> float:
        rounded = round_weight(weight * factors, scheme).weight()
        return float(((x / factors @ rounded.t() - x @ weight.t()) ** 2).sum())

    tried = [error(size**ratio) for ratio in np.linspace(0, 1, 20)]
    assert error(factors) == pytest.approx(min(tried), rel=1e-3)
    assert min(tried) < 0.95 * tried[0]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibrated_weights_lower_the_error_of_outputs(method, tmp_path: Path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    batches = list(correlated(240, 64).split(80))
    scheme = QuantizationScheme(4, 16, group=32, method=method)
    plain = tpuport.quantize(model, replace(scheme, method="round"), calibration=batches)
    made = tpuport.quantize(model, scheme, calibration=batches)
    assert made.quantization.outputs is not None
    assert plain.quantization.outputs is not None
    assert made.quantization.outputs.relative < 0.95 * plain.quantization.outputs.relative
    # The sums of batches are those of one, whatever the order.
    one, all_ = (calibrate(model, scheme, given) for given in ([torch.cat(batches)], batches))
    assert np.allclose(one.layers["0"]["gram"], all_.layers["0"]["gram"], rtol=1e-5, atol=1e-3)
    first, rest = (calibrate(model, scheme, given) for given in (batches[:1], batches[:0:-1]))
    merged = rest.merge(first)
    for name, values in all_.layers.items():
        for key, value in values.items():
            assert np.array_equal(merged.layers[name][key], value), (name, key)
    tpuport.save_checkpoint(tmp_path / "one.safetensors", made)
    again = tpuport.quantize(model, checkpoint=tmp_path / "one.safetensors")
    assert torch.equal(tpuport.to_torch(again(batches[0])), tpuport.to_torch(made(batches[0])))


class Uneven(torch.nn.Module):
    """Three layers of which the middle one has inputs with one large channel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = torch.ones(64).index_fill(0, torch.tensor([3]), 200.0)
        first, middle, last = self.layers
        return last(torch.tanh(middle(torch.tanh(first(x)) * size)))


def test_outliers_are_what_is_measured_and_pages_have_them(tmp_path: Path):
    torch.manual_seed(0)
    model, x = Uneven(), torch.randn(50, 64)
    scheme = QuantizationScheme(4, 8, method="hadamard", block=64)
    made = tpuport.quantize(model, scheme, calibration=[x])
    report = made.quantization
    layers = {one.name: one for one in report.layers}
    with torch.no_grad():
        inner = torch.tanh(model.layers[0](x)) * torch.ones(64).index_fill(
            0, torch.tensor([3]), 200.0
        )
        moved = made.module.get_submodule("layers.1").inputs(inner)  # pyright: ignore
    want = [float((r.abs().amax(-1) / (r**2).mean(-1).sqrt()).mean()) for r in (inner, moved)]
    assert layers["layers.1"].outliers == pytest.approx(want, rel=1e-3)
    # One channel of 64 has nearly all of the row; a rotation gives each the same.
    assert want[0] > 7
    assert want[1] < 1.5
    page = report.save(tmp_path / "report.html").read_text()
    assert "layers.1" in page
    assert "<svg" in page
    assert "layers.1" in report.save(tmp_path / "report.txt").read_text()
    said = json.loads(report.save(tmp_path / "report.json").read_text())
    assert report_of(said) == report
    assert said == json.loads(json.dumps(asdict(report)))


def test_search_keeps_as_few_layers_as_the_error_allows():
    torch.manual_seed(0)
    model, batches = Uneven(), [torch.randn(50, 64)]
    whole = tpuport.quantize(model, "w8a8", calibration=batches).quantization
    assert whole.outputs is not None
    worst = whole.by_error[0].name
    without = tpuport.quantize(model, "w8a8", calibration=batches, keep=[worst]).quantization
    assert without.outputs is not None
    allowed = 1.01 * without.outputs.relative
    assert allowed < whole.outputs.relative
    found = search(model, "w8a8", calibration=batches, error=allowed).quantization
    assert list(found.kept) == [worst]
    assert found.outputs == without.outputs
    everything = search(model, "w8a8", calibration=batches, error=2 * whole.outputs.relative)
    assert everything.quantization.kept == {}
    with pytest.raises(UsageError, match="differ by more than"):
        search(model, "w4a8", calibration=batches, error=1e-7)


@pytest.mark.parametrize("rows", [3, 5000])
def test_exact_sums_are_the_same_in_any_order_and_as_near_as_float32(rows: int):
    torch.manual_seed(0)
    x = torch.randn(rows, 24) * 10.0 ** torch.randint(-6, 4, (24,))
    x[:, 5] = 0
    x[1, 3] = 1e4
    scaled, scale = exact_sums.scaled_columns(x)

    def total(of: torch.Tensor) -> torch.Tensor:
        whole, rest = torch.zeros(24, 24), torch.zeros(24, 24)
        for term in exact_sums.products(of):
            whole, rest = exact_sums.add(whole, rest, term * scale[:, None] * scale)
        return whole.double() + rest

    found, size = total(scaled), x.double().square().sum(0).sqrt()
    error = (found - x.double().t() @ x.double()).abs()
    assert (error <= 2e-6 * torch.outer(size, size)).all()
    again = (total(scaled[torch.randperm(rows)]) - found).abs()
    # Up to 4,096 rows are one sum without rounding; sums of sums have 48 bits.
    assert (again <= (0 if rows == 3 else 1e-13) * torch.outer(size, size)).all()
    assert torch.equal(found[5], torch.zeros(24, dtype=torch.float64))
    plain = sum(exact_sums.sums(scaled.abs()))
    assert torch.allclose(plain * scale, x.abs().sum(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", ["smooth", "gptq"])
def test_a_layer_may_be_called_with_one_row_and_with_a_constant(method: str):
    class OfConstant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(x))) + self.down(torch.ones(64))

    torch.manual_seed(0)
    model, row = OfConstant(), torch.randn(32)
    scheme = QuantizationScheme(8, 8, method=method, activations="tensor")
    made = tpuport.quantize(model, scheme, calibration=[row, torch.randn(5, 32)])
    assert made.quantization.outputs is not None
    assert made.quantization.outputs.relative < 0.02
    error = tpuport.to_torch(made(row)) - model(row).detach()
    assert error.norm() < 0.03 * model(row).detach().norm()
