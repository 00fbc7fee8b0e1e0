"""Recordings of scripts that train several networks, and what is compared of them."""

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tpuport.verify import compare
from tpuport.verify.compare import (
    Comparison,
    Recording,
    Stage,
    behaviour,
    gradient_noise,
    interface,
    moved_elsewhere,
    why_empty,
)
from tpuport.verify.files import compare_files, renamed_files
from tpuport.verify.recorder import StepRecorder

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def _only_new_objects() -> Iterator[None]:
    """The recorder looks for modules among all objects; the suite's process has millions."""
    gc.freeze()
    yield
    gc.unfreeze()


def recorded(
    folder: Path,
    after_first: Callable[[Sequence[Any]], object] = lambda _: None,
    at_the_end: Callable[[Sequence[Any]], object] = lambda _: None,
    before: Callable[[Sequence[Any]], object] = lambda _: None,
    rate: float = 0.1,
) -> Recording:
    """Record a script of two networks with the same names, and an optimizer of both at the end.

    Args:
        folder: Where the recording goes.
        after_first: Changes the networks after their own optimizers' steps.
        at_the_end: Changes the networks after all steps.
        before: Changes the networks before all steps.
        rate: The learning rate.
    """
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)) for _ in range(2)]
    each = [torch.optim.SGD(net.parameters(), rate) for net in nets]
    both = torch.optim.SGD([*nets[0].parameters(), *nets[1].parameters()], rate)
    before(nets)
    folder.mkdir()
    recorder = StepRecorder(folder, "trained", 2)
    for optimizer in (*each, both):
        if optimizer is both:
            after_first(nets)
        x = torch.randn(4, 3)
        one, other = ((net(x) ** 3).sum() for net in nets)
        loss = one + other
        optimizer.zero_grad()
        loss.backward()
        recorder.since_step += [loss.item(), loss.item()]
        recorder.before_step(optimizer)
        optimizer.step()
        recorder.after_step(optimizer)
    at_the_end(nets)
    recorder.finish()
    return Recording(folder)


def in_place(nets: Sequence[Any]) -> None:
    nets[0][0].running_mean.add_(1.0)


def assigned_anew(nets: Sequence[Any]) -> None:
    nets[0][0].running_mean = nets[0][0].running_mean + 1.0


def of_the_second(nets: Sequence[Any]) -> None:
    nets[1][0].running_var.mul_(2.0)


@pytest.mark.parametrize("fault", [in_place, assigned_anew, of_the_second])
def test_buffers_of_all_networks_are_compared(tmp_path: Path, fault: Any) -> None:
    eager = recorded(tmp_path / "eager")
    same = behaviour(eager, recorded(tmp_path / "same"), 1e-3)
    assert same.passed
    assert {check.what: check.count for check in same.checks}["buffers at the end"] == 6
    assert not behaviour(eager, recorded(tmp_path / "ported", at_the_end=fault), 1e-3).passed


def test_rounding_in_one_network_allows_nothing_in_another_of_the_same_names(
    tmp_path: Path,
) -> None:
    def moved(which: int) -> Callable[[Sequence[Any]], object]:
        def change(nets: Sequence[Any]) -> None:
            with torch.no_grad():
                nets[which][1].bias.add_(1.0)

        return change

    eager = recorded(tmp_path / "eager")
    rounded = recorded(tmp_path / "rounded", at_the_end=moved(0))
    for which, passes in ((0, True), (1, False)):
        ported = recorded(tmp_path / f"ported {which}", at_the_end=moved(which))
        found = behaviour(eager, ported, 1e-3, rounded)
        assert found.passed is passes
        if not passes:
            problems = str([check.problems for check in found.checks])
            assert "1.bias (optimizer 1, position 3): " in problems


def test_what_another_optimizer_moved_before_is_no_start(tmp_path: Path) -> None:
    def rounds(nets: Sequence[Any]) -> None:
        with torch.no_grad():
            nets[0][1].weight.mul_(1 + 1e-6)

    eager = recorded(tmp_path / "eager")
    ported = recorded(tmp_path / "ported", after_first=rounds)
    found = interface(eager, ported)
    assert found.passed, found
    assert found.checks[1].count == 8
    assert behaviour(eager, ported, 1e-3).passed


@pytest.mark.parametrize(("factor", "passes"), [(1 + 1e-6, True), (1 + 1e-3, False)])
def test_a_start_that_the_first_call_computes_may_be_rounded(
    tmp_path: Path, factor: float, passes: bool
) -> None:
    """Of a parameter that began elsewhere by rounding, the movement is compared."""

    def computed(nets: Sequence[Any]) -> None:
        with torch.no_grad():
            nets[0][1].weight.mul_(factor)

    eager = recorded(tmp_path / "eager", rate=1e-6)
    ported = recorded(tmp_path / "ported", before=computed, rate=1e-6)
    assert interface(eager, ported, 1e-4).passed is passes
    if passes:
        found = behaviour(eager, ported, 1e-1)
        assert found.passed, found


def test_losses_of_one_step_are_told_apart(tmp_path: Path) -> None:
    eager, ported = recorded(tmp_path / "eager"), recorded(tmp_path / "ported")
    ported.losses[1][0] *= 2
    assert "step 2, backward 1: " in str(behaviour(eager, ported, 1e-3).checks[0].problems)


@pytest.mark.parametrize("name", ["model.tar", "model.chkpt", "checkpoint_3"])
def test_what_torch_saved_is_compared_whatever_its_name(tmp_path: Path, name: str) -> None:
    for side, value in (("eager", 1.0), ("ported", 1.5)):
        (tmp_path / side).mkdir()
        torch.save({"weight": torch.full((3,), value)}, tmp_path / side / name)
        (tmp_path / side / "train.log").write_text(side)
    found = compare_files(tmp_path / "eager", tmp_path / "ported")
    assert found.problems == []
    assert found.errors == [(name, pytest.approx(0.5))]


def test_nan_in_one_of_two_files_is_a_difference(tmp_path: Path) -> None:
    """A script keeps the best loss in its checkpoint, which is infinite in both at first."""
    for side, value in (("eager", 1.0), ("ported", NAN)):
        (tmp_path / side).mkdir()
        torch.save({"best": torch.tensor([INF, NAN])}, tmp_path / side / "same.pt")
        torch.save({"best": torch.tensor(INF), "x": torch.tensor(value)}, tmp_path / side / "x.pt")
    found = compare_files(tmp_path / "eager", tmp_path / "ported")
    assert dict(found.errors)["x.pt"] == INF
    assert dict(found.errors).get("same.pt", 0.0) == 0.0


@pytest.mark.parametrize(
    ("mine", "other", "relative"),
    [
        ([], [], 0.0),
        ([0.0, 1.0], [-0.0, 1.0], 0.0),
        ([3.0, -4.0], [3.0, -4.5], 0.125),
        ([1.0, INF], [2.0, INF], 1.0),
        ([2.0, NAN], [3.0, NAN], 0.5),
        ([2.0, NAN], [2.0, 1.0], NAN),
        ([2.0, INF], [2.0, 1.0], INF),
        ([0.0, 0.0], [0.0, 1.0], INF),
    ],
)
def test_differences_of_any_numbers(mine: list[float], other: list[float], relative: float) -> None:
    """The largest of finite numbers is found without looking for others, which takes longer."""
    found = compare._relative(torch.tensor(mine), torch.tensor(other))
    assert found == pytest.approx(relative, nan_ok=True)


def test_a_movement_begins_where_its_run_began() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([11.0, 2.0])
    moved = compare._movement({"w": torch.zeros(2)}, {"w": torch.tensor([10.0, 0.0])})
    assert moved(a, b, "w") == 0.0
    assert moved(a, a, "w") == pytest.approx(10 / 5**0.5)


@pytest.mark.parametrize("loss", [0.5, NAN])
@pytest.mark.parametrize("gradients", [[0.0, 0.0], [0.0, NAN], [0.0, 2.0]])
def test_what_equality_says_nothing_of(
    tmp_path: Path, loss: float, gradients: Sequence[float]
) -> None:
    """As in a loss over no rows: it is NaN, and its gradients are zeros."""
    network = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    recorder = StepRecorder(tmp_path, "trained", 2)
    network.weight.grad = torch.tensor([gradients])
    recorder.since_step += [loss]
    recorder.before_step(optimizer)
    optimizer.step()
    recorder.after_step(optimizer)
    recorder.finish()
    why = why_empty(Recording(tmp_path))
    assert ("loss" in why) == (loss != loss)
    assert ("gradient" in why) == (loss == loss and gradients[1] != 2.0)
    assert bool(why) == (loss != loss or gradients[1] != 2.0)


@pytest.mark.parametrize(
    ("mine", "other", "pairs"),
    [
        ("2026-11-30/19-45-35/model.pt", "2026-11-30/19-47-02/model.pt", True),
        ("2026.11.30/194535/model.pt", "2026.12.01/000001/model.pt", True),
        ("run_20261130_235959/model.pt", "run_20261201_000003/model.pt", True),
        ("experiment_86669.ckpt", "experiment_80871.ckpt", True),
        ("epoch_10.pt", "epoch_20.pt", False),
        ("experiment_86669.ckpt", "experiment_80871.pt", False),
    ],
)
def test_files_that_a_run_names_by_its_time_are_compared(
    tmp_path: Path, mine: str, other: str, pairs: bool
) -> None:
    for change in (0.0, 0.5):
        for side, name, value in (("eager", mine, 1.0), ("ported", other, 1.0 + change)):
            (tmp_path / side / name).parent.mkdir(parents=True, exist_ok=True)
            torch.save({"w": torch.tensor([2.0, value])}, tmp_path / side / name)
        found = compare_files(tmp_path / "eager", tmp_path / "ported")
        assert [name for name, _ in found.errors] == [mine] * pairs
        assert [error == change / 2 for _, error in found.errors] == [True] * pairs
        assert len(found.problems) == (0 if pairs else 2)
        notes = renamed_files(tmp_path / "eager", tmp_path / "ported")
        assert len(notes) == pairs
        assert all(mine in note and other in note for note in notes)
    # Which of two belongs to which is not known.
    for side, name in (("eager", "seed_12345.pt"), ("eager", "seed_23456.pt")):
        torch.save({}, tmp_path / side / name)
    torch.save({}, tmp_path / "ported" / "seed_34567.pt")
    found = compare_files(tmp_path / "eager", tmp_path / "ported")
    assert len([one for one in found.problems if "seed" in one]) == 3


def test_a_run_without_an_optimizer_says_what_its_files_say(tmp_path: Path) -> None:
    StepRecorder(tmp_path, "trained", 1).finish()
    assert "no file" in why_empty(Recording(tmp_path))
    (tmp_path / "files" / "checkpoints").mkdir(parents=True)
    (tmp_path / "files" / "train.log").write_text("what failed was caught")
    assert "no file" in why_empty(Recording(tmp_path))
    (tmp_path / "files" / "checkpoints" / "out.npy").write_bytes(b"")
    assert not why_empty(Recording(tmp_path))


def test_what_is_added_to_gradients_is_as_large_as_what_they_differ_by(tmp_path: Path) -> None:
    """Adam makes steps of full size of numbers that are small beside the others of a gradient."""
    size = torch.linspace(-1.0, 1.0, 4000)
    recorder = StepRecorder(tmp_path, "trained", 1, disturbed=True, noise={"0.1": 3e-6})
    weights = [nn.Parameter(torch.zeros(4000)) for _ in range(2)]
    for weight in weights:
        weight.grad = size.clone()
    recorder.before_step(torch.optim.Adam(weights))
    apart = [float((weight.grad - size).std()) for weight in weights if weight.grad is not None]
    assert apart == [pytest.approx(1.2e-7, rel=0.1), pytest.approx(3e-6, rel=0.1)]


def test_gradients_differ_by_no_more_than_rounding(tmp_path: Path) -> None:
    eager, ported = (recorded(tmp_path / side) for side in ("eager", "ported"))
    assert set(gradient_noise(eager, ported).values()) == {0.0}
    key = next(name for name in ported.tensors if name.startswith("gradient/0.2"))
    largest = float(ported.tensors[key].abs().max())
    for added, found in [(1e-6 * largest, 1e-6 * largest), (largest, 1e-5 * largest), (NAN, None)]:
        ported.tensors[key] = eager.tensors[key] + added
        noise = gradient_noise(eager, ported).get("0.2")
        assert noise == (None if found is None else pytest.approx(found, rel=0.1))


@pytest.mark.parametrize(("limit", "most"), [(1e-6, 1e-5), (1e-4, 1e-5), (2e-2, 2e-3)])
def test_rounding_of_gradients_is_as_large_as_their_dtype_makes_it(
    limit: float, most: float, tmp_path: Path
) -> None:
    """As under autocast, where gradients that are equal within bfloat16 are 3e-3 apart."""
    eager, ported = (recorded(tmp_path / side) for side in ("eager", "ported"))
    key = next(name for name in ported.tensors if name.startswith("gradient/0.2"))
    largest = float(ported.tensors[key].abs().max())
    ported.tensors[key] = eager.tensors[key] + 5e-3 * largest
    noise = gradient_noise(eager, ported, limit)["0.2"]
    assert noise == pytest.approx(most * largest, rel=0.1)


@pytest.mark.parametrize(("apart", "elsewhere"), [(3e-3, 2e-3), (2e-2, None), (INF, None)])
def test_which_values_rounding_moves_is_chance(apart: float, elsewhere: float | None) -> None:
    """As where one number of 147,456 has another sign, and Adam steps the other way with it."""
    check = Comparison("parameters at the end", limit=1e-3, allowed={"one": 1e-2, "other": 2e-3})
    check.add("one", 5e-3)
    check.add("other", apart)
    fine = Comparison("losses of all steps", limit=1e-3)
    assert moved_elsewhere(Stage("behaviour", [fine, check])) == elsewhere
    assert moved_elsewhere(Stage("behaviour", [fine])) is None
    check.problems.append("third: in the port only")
    assert moved_elsewhere(Stage("behaviour", [check])) is None
