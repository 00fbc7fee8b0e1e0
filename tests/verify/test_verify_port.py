"""Ports that others wrote: a right one agrees, and each kind of mistake is found where it is."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import tpuport
from tests.verify import small_gpt
from tpuport.cli.app import FAILED, WRONG_CALL, app
from tpuport.foundation.errors import ParityError, UsageError
from tpuport.verify.ports.report import PortVerification
from tpuport.verify.ports.table import OriginalState, find


def compare(fault: str = "", *, dropout: float = 0.0, trains: bool = False) -> PortVerification:
    model = small_gpt.make(dropout)
    more: dict[str, Any] = {"port_kwargs": {"key": jax.random.key(3)}} if dropout else {}
    return tpuport.verify_port(
        model,
        small_gpt.port(fault),
        small_gpt.params(model, fault),
        args=(small_gpt.tokens(),),
        losses=(small_gpt.loss, small_gpt.port_loss(fault)),
        **more,
        **(small_gpt.training(fault) if trains else {}),
    )


def failed_checks(report: PortVerification) -> list[str]:
    return [c.what for stage in report.stages for c in stage.checks if not c.passed]


def test_a_right_port_agrees_in_three_stages(tmp_path: Path):
    report = compare(trains=True)
    report.check()
    assert [stage.name for stage in report.stages] == ["interface", "numbers", "behaviour"]
    exact = {c.what: c.error for c in report.stages[1].checks}
    assert exact["outputs, float64"] < 1e-13
    assert exact["loss, float64"] < 1e-13
    found, all_of_them = report.found
    assert found > 0.8 * all_of_them
    assert not report.first
    report.save(tmp_path / "report.json")
    report.save(tmp_path / "report.html")
    fields = json.loads((tmp_path / "report.json").read_text())
    assert fields["passed"] is True
    assert {"leaf": "mlp.up.kernel", "code": 'w["fc1.weight"].T', "how": "value"} in fields[
        "weights"
    ]
    assert "Everything that was compared agrees." in (tmp_path / "report.html").read_text()
    with pytest.raises(UsageError, match=r"\.json"):
        report.save(tmp_path / "report.md")


def test_a_right_port_with_dropout_agrees_in_training_mode():
    report = compare(dropout=0.25)
    report.check()
    assert [c.count for c in report.stages[1].checks if c.what == "dropout masks"] == [1]


# The fault, the checks that fail, the op of the original, and the code of the port where the two
# part.
PLACES = [
    ("transposed kernel", "outputs, float64", "aten.addmm in proj", 'x @ p["kernel"]'),
    ("epsilon", "outputs, float64", "aten.native_layer_norm in norm1", "x - mean"),
    ("gelu", "outputs, float64", "aten.gelu", "jax.nn.gelu"),
    ("mask", "outputs, float64", "aten.masked_fill.Scalar", "jnp.where(seen"),
    ("bf16 norm", "outputs, own dtypes", "aten.native_layer_norm in norm1", "astype(jnp.bfloat16)"),
    ("reduction", "loss, float64", "aten.", "softmax_cross_entropy"),
]


@pytest.mark.parametrize(("fault", "check", "op", "code"), PLACES, ids=lambda one: str(one)[:17])
def test_a_mistake_in_the_forward_pass_is_found(fault: str, check: str, op: str, code: str):
    report = compare(fault, trains=True)
    assert report.failed_stage == "numbers"
    assert check in failed_checks(report)
    (first,) = report.first
    assert op in str(first.original[0])
    assert code in first.port[0].source
    assert "small_gpt.py:" in first.port[0].where
    with pytest.raises(ParityError, match="first difference on the way to"):
        report.check()


def test_a_missing_scale_of_dropout_is_found():
    report = compare("dropout scale", dropout=0.25)
    assert failed_checks(report) == ["outputs, float64", "loss, float64"]
    assert "drop" in report.first[0].original[0].inside
    assert "drop(" in report.first[0].port[0].source


def test_weights_that_are_no_longer_tied_are_found():
    report = compare("untied")
    assert report.failed_stage == "interface"
    (check,) = [c for c in report.stages[0].checks if not c.passed]
    (problem,) = check.problems
    assert "tied in the original (embed.weight, head.weight)" in problem
    assert problem.endswith("head, wte")


@pytest.mark.parametrize(
    ("fault", "check", "note"),
    [
        ("decay", "parameters after step 1", "weight decay"),
        ("average", "average after step 1", "before the optimizer's step"),
    ],
)
def test_a_mistake_in_training_is_found(fault: str, check: str, note: str):
    report = compare(fault, trains=True)
    assert report.failed_stage == "behaviour"
    assert check in failed_checks(report)
    assert any(note in one for one in report.notes)
    if fault == "average":
        assert "parameters after step 3" not in failed_checks(report)


def test_a_port_that_raises_is_reported_with_its_line():
    model = nn.Linear(3, 4)

    def port(p: Any, x: Any) -> Any:
        return x @ p["kernel"]

    report = tpuport.verify_port(
        model, port, {"kernel": model.weight.detach().numpy()}, args=(torch.ones(2, 3),)
    )
    assert not report.passed
    assert "return x @ p" in report.failure
    assert "test_verify_port.py:" in str(report)


def test_code_that_sets_its_dtypes_is_compared_in_float64_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten())

    def port(p: Any, x: Any) -> Any:
        start = jnp.zeros(4, jnp.float32)  # a carry that would not take float64

        def row(total: Any, one: Any) -> Any:
            return total + one, one @ p["kernel"] + p["bias"]

        return jax.lax.scan(row, start, x)[1]

    weights = {
        "kernel": model[0].weight.detach().numpy().T,
        "bias": model[0].bias.detach().numpy(),
    }
    report = tpuport.verify_port(model, port, weights, args=(torch.randn(3, 4),))
    report.check()
    assert report.stages[1].checks[0].error < 1e-12


def test_an_original_that_raises_is_no_mistake_of_the_port():
    class Broken(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tpuport.verify_port(
            Broken(2, 2), lambda p, x: x, {"k": np.ones(3, np.float32)}, args=(torch.ones(1, 2),)
        )


def test_random_numbers_of_the_original_are_no_rounding():
    class Noisy(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + torch.randn(2)

    class Counting(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + float(np.random.rand())

    def compared(model: nn.Linear) -> PortVerification:
        weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
        port = lambda p, x: x @ p["weight"].T + p["bias"]  # noqa: E731
        return tpuport.verify_port(model, port, weights, args=(torch.ones(1, 2),))

    report = compared(Noisy(2, 2))
    assert report.failed_stage == "numbers"
    assert any("random numbers that the original draws" in note for note in report.notes)
    with pytest.raises(UsageError, match="another result when it runs again"):
        compared(Counting(2, 2))


def test_weights_that_only_their_own_value_suits_are_not_varied():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale.sqrt()

    port = lambda p, x: x * jnp.sqrt(p["scale"])  # noqa: E731
    weights = {"scale": np.zeros(4, np.float32)}
    report = tpuport.verify_port(Scaled(), port, weights, args=(torch.ones(2, 4),))
    assert not any("other values on both sides" in note for note in report.notes)
    assert report.stages[1].checks[0].passed


def test_outputs_in_another_layout_are_named():
    model = nn.Conv2d(3, 4, 3, bias=False)
    kernel = model.weight.detach().permute(2, 3, 1, 0).numpy()

    def port(p: Any, x: Any) -> Any:
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), "VALID", dimension_numbers=dims)

    x = torch.randn(2, 3, 8, 8)
    given = {"args": (x,), "port_args": (x.permute(0, 2, 3, 1),)}
    report = tpuport.verify_port(model, port, {"kernel": kernel}, **given)
    assert report.failed_stage == "interface"
    assert "output=" in failed_text(report)
    tpuport.verify_port(
        model, port, {"kernel": kernel}, **given, output=lambda y: y.transpose(0, 3, 1, 2)
    ).check()


def failed_text(report: PortVerification) -> str:
    return "\n".join(p for stage in report.stages for c in stage.checks for p in c.problems)


def test_a_weight_that_the_port_lacks_is_named():
    model = nn.Linear(3, 4)
    report = tpuport.verify_port(
        model,
        lambda p, x: x @ p["kernel"],
        {"kernel": model.weight.detach().numpy().T.copy()},
        args=(torch.ones(2, 3),),
    )
    assert report.failed_stage == "interface"
    assert "bias: it is in no leaf of the port" in failed_text(report)


def test_what_was_not_looked_at_is_said():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    norm = model[0]
    assert isinstance(norm, nn.BatchNorm1d)

    def port(p: Any, x: Any) -> Any:
        mean, var = x.mean(0), x.var(0)
        return (x - mean) / jnp.sqrt(var + 1e-5) * p["scale"] + p["bias"]

    weights = {"scale": np.ones(3, np.float32), "bias": np.zeros(3, np.float32)}
    report = tpuport.verify_port(model, port, weights, args=(torch.randn(8, 3),))
    assert "the original drops 1 times, the port 0 times" in failed_text(report)
    assert any("0.running_mean" in note for note in report.notes)


# The table of weights.


def test_weights_are_found_by_value_whatever_their_layout():
    model = nn.ModuleDict(
        {f"layers_{i}": nn.Linear(6, 8) for i in range(3)} | {"conv": nn.Conv2d(2, 3, 3)}
    )
    named = {name: value.detach().numpy() for name, value in model.named_parameters()}
    weights = [named[f"layers_{i}.weight"] for i in range(3)]
    leaves = {
        "stacked.kernel": np.stack([w.T for w in weights]),
        "conv.kernel": named["conv.weight"].transpose(2, 3, 1, 0).copy(),
        "heads.kernel": weights[0].T.reshape(6, 2, 4).copy(),
        "half": weights[1][4:].copy(),
        "low": weights[2].astype(np.float16),
        "merged": np.concatenate([named["layers_0.bias"], named["layers_1.bias"]]),
        "shuffled": weights[0].reshape(-1)[np.random.default_rng(0).permutation(48)],
    }
    state = OriginalState(model)
    table = find(state, leaves, {})
    assert not table.unknown
    for leaf, entry in table.entries.items():
        assert entry.how == "value", leaf
        np.testing.assert_array_equal(
            state.flat[entry.ids].astype(leaves[leaf].dtype), leaves[leaf], err_msg=leaf
        )
    w = {name: value.detach() for name, value in model.named_parameters()}
    for leaf in ("stacked.kernel", "conv.kernel", "heads.kernel", "half", "merged"):
        made = eval(table.entries[leaf].code, {"w": w, "torch": torch})
        np.testing.assert_array_equal(made.numpy(), leaves[leaf])


def test_values_can_be_copied_by_a_table_that_the_caller_edits():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def port(p: Any, x: Any) -> Any:
        h = jax.nn.relu(p["w"] @ x.T + p["b"][:, None])
        return (p["out"]["kernel"].T @ h).T + p["out"]["bias"]

    empty = {
        "w": np.zeros((4, 4), np.float32),
        "b": np.zeros(4, np.float32),
        "out": {"kernel": np.zeros((4, 2), np.float32), "bias": np.zeros(2, np.float32)},
    }
    names = {"w": "0.weight", "b": "0.bias", "out.kernel": lambda w: w["2.weight"].T}
    given = {"args": (torch.randn(3, 4),), "names": names, "weights": "copy"}
    tpuport.verify_port(model, port, empty, **given).check()
    assert not empty["w"].any()
    with pytest.raises(UsageError, match="no leaf of the port"):
        tpuport.verify_port(model, port, empty, **{**given, "names": {"v": "0.weight"}})
    with pytest.raises(UsageError, match="not of the original"):
        tpuport.verify_port(model, port, empty, **{**given, "names": {"w": "0.wieght"}})
    with pytest.raises(UsageError, match="only choose and move"):
        tpuport.verify_port(
            model, port, empty, **{**given, "names": {"b": lambda w: w["0.bias"] * 2.0}}
        )


def test_scanned_blocks_and_branches_of_the_port_are_followed():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    kernels = np.stack([block[0].weight.detach().numpy().T for block in model])  # pyright: ignore
    biases = np.stack([block[0].bias.detach().numpy() for block in model])  # pyright: ignore

    def port(p: Any, x: Any) -> Any:
        def block(h: Any, layer: Any) -> Any:
            h = jnp.tanh(h @ layer["kernel"] + layer["bias"])
            return jax.lax.cond(h.sum() > 1e6, lambda a: -a, lambda a: a, h), None

        return jax.lax.scan(block, x, p)[0]

    report = tpuport.verify_port(
        model, port, {"kernel": kernels, "bias": biases}, args=(torch.randn(2, 4),)
    )
    report.check()
    assert report.found[0] == report.found[1]


# The command, and the page about it.

SPEC = """
import torch

from tests.verify import small_gpt


def make():
    model = small_gpt.make()
    return {
        "torch_model": model,
        "jax_function": small_gpt.port(%r),
        "params": small_gpt.params(model),
        "args": (small_gpt.tokens(),),
    }
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify-port", *arguments])


def test_the_command_runs_a_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec, page = tmp_path / "spec_of_gelu.py", tmp_path / "report.html"
    spec.write_text(SPEC % "gelu")
    result = invoke(str(spec), "--json", "--report", str(page))
    assert result.exit_code == FAILED, result.output
    fields = json.loads(result.stdout)
    assert fields["failed_stage"] == "numbers"
    assert "jax.nn.gelu" in fields["first_difference"][0]["port"][0]["source"]
    assert "jax.nn.gelu" in page.read_text()


def test_a_wrong_specification_is_a_wrong_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "empty_spec.py").write_text("")
    (tmp_path / "odd_spec.py").write_text("def make():\n    return {'modle': 1}\n")
    for spec, message in (
        (str(tmp_path / "gone.py"), "no file"),
        ("no_such_module_here", "no module"),
        (str(tmp_path / "empty_spec.py"), "no function make()"),
        (str(tmp_path / "odd_spec.py"), "torch_model"),
    ):
        result = invoke(spec)
        assert result.exit_code == WRONG_CALL
        assert message in result.output


def test_the_snippets_of_the_page_run():
    page = Path(__file__).parents[2] / "docs/verify_port.md"
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(code, str(page), "exec"), names)
    assert set(names["make"]()) == {"torch_model", "jax_function", "params", "args"}
