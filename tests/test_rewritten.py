"""The comparison of real models with their rewritten source: what it compares, and what with."""

import importlib
import sys

import pytest
import torch

from benchmarks import stand_ins
from benchmarks.rewritten import Draws, Run, equal, verdict
from benchmarks.upstream_models import Case

ONE = {"out": torch.tensor([1.0, 2.0]), "grad w": torch.tensor([3.0])}


def test_results_are_equal_only_bit_for_bit():
    assert equal(ONE, {name: value.clone() for name, value in ONE.items()}, 0.0) == "equal"
    close = ONE | {"out": torch.tensor([1.0, 2.0 + 1e-6])}
    assert equal(ONE, close, 0.0).startswith("! out differs by 4.8e-07")
    assert equal(ONE, close, 1e-4) == "4.8e-07"


@pytest.mark.parametrize(
    "wrong",
    [
        ONE | {"grad w": torch.tensor([3.1])},
        ONE | {"out": torch.tensor([1.0, float("nan")])},
        ONE | {"out": torch.tensor([1.0])},
        {"out": ONE["out"]},
        ONE | {"more": torch.zeros(1)},
        {},
    ],
)
def test_what_differs_is_said(wrong: dict[str, torch.Tensor]):
    assert equal(ONE, wrong, 1e-4).startswith("!")


def test_a_gradient_of_rounding_errors_is_no_yardstick():
    noise = ONE | {"grad b": torch.tensor([1e-9])}
    assert equal(noise, noise | {"grad b": torch.tensor([2e-9])}, 1e-4) == "3.3e-07"


def case() -> Case:
    return Case("name", torch.nn.Identity, lambda model, inputs: inputs, dict)


def test_every_failure_is_in_the_table():
    right = Run(eager=ONE, plain=ONE, ported={"out": ONE["out"]}, worst=1e-6)
    assert [cell for cell in verdict(case(), right, right).values() if cell.startswith("!")] == []
    for wrong in (
        Run(errors={"eager": "ValueError: no"}),
        Run(eager=ONE | {"out": torch.zeros(2)}, plain=ONE),
        Run(eager=ONE, plain={"out": ONE["out"]}),
        Run(eager=ONE, plain=ONE, live=["TPU101 a.py:1"]),
        Run(eager=ONE, plain=ONE, ported={"out": torch.zeros(2)}),
        Run(eager=ONE, plain=ONE, errors={"convert": "PortError: no"}),
    ):
        assert any(cell.startswith("!") for cell in verdict(case(), right, wrong).values())


def test_draws_are_handed_out_again():
    draws, real = Draws(), torch.randn
    with draws.recorded():
        first = torch.randn(2), torch.randint(0, 9, (3,))
    with draws.replayed(lambda tensor: tensor):
        again = torch.randn(2), torch.randint(0, 9, (3,))
    assert all(map(torch.equal, first, again))
    assert torch.randn is real


def test_the_stand_in_for_flex_attention_gives_zeros_for_empty_rows():
    q, k, v = torch.randn(3, 2, 2, 5, 4)
    valid = torch.arange(5) < torch.tensor([[3], [5]])

    def score_mod(score, b, h, i, j):
        del h
        return torch.where(valid[b, i] & valid[b, j], score, float("-inf"))

    got = stand_ins.flex_attention(q, k, v, score_mod=score_mod)
    mask = (valid[:, :, None] & valid[:, None])[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.allclose(got, expected, atol=1e-6)


def test_a_stand_in_answers_to_every_name(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [stand_ins.StandIns(["absent_package"]), *sys.meta_path])
    module = importlib.import_module("absent_package.part.more")
    assert isinstance(module.Anything(1, two=2), module.Anything.__mro__[1])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("another_absent_package")
