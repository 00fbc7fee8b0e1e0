"""Each loss equals torch.distributions or a count by hand, and so do its gradients."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical, Laplace, kl_divergence

from recipes.openpilot.generations import GENERATIONS
from recipes.openpilot.losses import (
    LossWeights,
    binary_cross_entropy,
    cross_entropy,
    distillation_terms,
    driving_terms,
    feature_distance,
    laplace_kl,
    laplace_nll,
    masked_huber,
    masked_l1,
    masked_mean,
    path_l1,
    total_of,
    winner_takes_all,
)
from recipes.openpilot.outputs import Mdn, predictions
from tpuport.foundation.errors import UsageError

ALL = torch.ones(3)


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def check_same(mine: torch.Tensor, theirs: torch.Tensor, *leaves: torch.Tensor) -> None:
    """Value and gradients."""
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad(mine, leaves, allow_unused=True)
    expected = torch.autograd.grad(theirs, leaves, allow_unused=True)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_likelihood_is_that_of_a_laplace_distribution():
    mean, log_std, target = leaf(3, 5), leaf(3, 5, seed=1), leaf(3, 5, seed=2).detach()
    expected = -Laplace(mean, log_std.exp()).log_prob(target)
    check_same(laplace_nll(mean, log_std, target).sum(), expected.sum(), mean, log_std)
    narrow = laplace_nll(torch.zeros(1), torch.full((1,), -50.0), torch.ones(1))
    assert narrow.item() == pytest.approx(1 / 0.01 + math.log(0.02), rel=1e-4)


def test_the_mean_leaves_out_what_is_masked():
    each = torch.tensor([[1.0, 3.0], [float("nan"), 5.0]], requires_grad=True)
    loss = masked_mean(each, torch.tensor([1.0, 0.0]))
    assert loss.item() == 2.0
    loss.backward()
    assert each.grad is not None
    assert each.grad.tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert masked_mean(each.detach(), torch.zeros(2)).item() == 0.0
    weighed = masked_mean(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 0.5]))
    assert weighed.item() == pytest.approx(2.0)


def test_the_winner_takes_all():
    mean, log_std, logits = leaf(3, 5, 4, 2), leaf(3, 5, 4, 2, seed=1), leaf(3, 5, 1, seed=2)
    target = leaf(3, 4, 2, seed=3).detach()
    expected, winners = torch.zeros(()), []
    for row in range(3):
        each = torch.stack(
            [
                -Laplace(mean[row, h], log_std[row, h].exp()).log_prob(target[row]).mean()
                for h in range(5)
            ]
        )
        best = int(each.argmin())
        winners.append(best)
        expected = expected + (
            each[best] - Categorical(logits=logits[row, :, 0]).log_prob(torch.tensor(best))
        )
    assert len(set(winners)) > 1
    found = winner_takes_all(Mdn(mean, log_std, logits), target, ALL)
    check_same(found, expected / 3, mean, log_std, logits)
    # Only the winner learns the target.
    (grad,) = torch.autograd.grad(winner_takes_all(Mdn(mean, log_std, logits), target, ALL), mean)
    moved = grad.abs().flatten(2).sum(-1) > 0
    assert moved.sum(1).tolist() == [1, 1, 1]
    assert moved.int().argmax(1).tolist() == winners


def test_each_choice_has_its_own_winner():
    mean, log_std, logits = leaf(2, 2, 6, 4), leaf(2, 2, 6, 4, seed=1), leaf(2, 2, 3, seed=2)
    target, mask = leaf(2, 3, 6, 4, seed=3).detach(), torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    expected = torch.zeros(())
    for row in range(2):
        for choice in range(3):
            each = torch.stack(
                [
                    laplace_nll(mean[row, h], log_std[row, h], target[row, choice]).mean()
                    for h in range(2)
                ]
            )
            best = int(each.argmin())
            named = -logits[row, :, choice].log_softmax(0)[best]
            expected = expected + mask[row, choice] * (each[best] + named)
    found = winner_takes_all(Mdn(mean, log_std, logits), target, mask)
    check_same(found, expected / 3, mean, log_std, logits)


def test_one_hypothesis_is_plain_likelihood():
    mean, log_std, target = leaf(3, 4), leaf(3, 4, seed=1), leaf(3, 4, seed=2).detach()
    expected = -Laplace(mean, log_std.exp()).log_prob(target).mean()
    check_same(winner_takes_all(Mdn(mean, log_std, None), target, ALL), expected, mean, log_std)


def test_lines_are_an_l1_distance_in_metres():
    mean, target = leaf(3, 4, 33, 2), leaf(3, 4, 33, 2, seed=1).detach()
    mask = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    kept = [(i, j) for i in range(3) for j in range(4) if mask[i, j]]
    expected = torch.stack([F.l1_loss(mean[i, j], target[i, j]) for i, j in kept]).mean()
    check_same(masked_l1(Mdn(mean, mean, None), target, mask), expected, mean)


def test_paths_are_an_l1_distance_of_positions_and_velocities():
    mean, target = leaf(3, 33, 15), leaf(3, 33, 15, seed=1).detach()
    expected = (mean[..., :6] - target[..., :6]).abs().mean()
    check_same(path_l1(Mdn(mean, mean, None), target, ALL), expected, mean)
    several, logits = leaf(3, 5, 33, 15, seed=2), leaf(3, 5, 1)
    each = torch.stack(
        [
            torch.stack([F.l1_loss(several[n, h, :, :6], target[n, :, :6]) for h in range(5)]).min()
            for n in range(3)
        ]
    )
    check_same(path_l1(Mdn(several, several, logits), target, ALL), each.mean(), several)


@pytest.mark.parametrize("delta", [0.3, 1.0])
def test_huber(delta: float):
    mean, target = leaf(3, 3, 6, 4), leaf(3, 3, 6, 4, seed=1).detach()
    expected = F.huber_loss(mean, target, delta=delta)
    mdn = Mdn(mean, mean, None)
    check_same(masked_huber(mdn, target, torch.ones(3, 3), delta), expected, mean)


def test_huber_of_hypotheses_is_that_of_the_nearest():
    mean, logits = leaf(2, 2, 6, 4), leaf(2, 2, 3, seed=2)
    target = leaf(2, 3, 6, 4, seed=3).detach()
    expected = torch.zeros(())
    for row in range(2):
        for choice in range(3):
            each = torch.stack([F.huber_loss(mean[row, h], target[row, choice]) for h in (0, 1)])
            best = int(each.argmin())
            expected = expected + each[best] - logits[row, :, choice].log_softmax(0)[best]
    found = masked_huber(Mdn(mean, mean, logits), target, torch.ones(2, 3))
    check_same(found, expected / 6, mean, logits)


def test_cross_entropies():
    logits, classes = leaf(3, 8), torch.tensor([1, 0, 7])
    found = cross_entropy(logits, F.one_hot(classes, 8).float(), ALL)
    check_same(found, F.cross_entropy(logits, classes), logits)
    target = torch.tensor([[0.0, 1, 0.3]]).expand(3, 3)
    bits = leaf(3, 3)
    expected = F.binary_cross_entropy(bits.sigmoid(), target)
    check_same(binary_cross_entropy(bits, target, ALL), expected, bits)


def test_distillation_is_the_divergence_of_laplace_distributions():
    mean, log_std = leaf(3, 7), leaf(3, 7, seed=1)
    other, other_std = leaf(3, 7, seed=2).detach(), leaf(3, 7, seed=3).detach()
    expected = kl_divergence(Laplace(other, other_std.exp()), Laplace(mean, log_std.exp())).mean()
    student, teacher = Mdn(mean, log_std, None), Mdn(other, other_std, None)
    check_same(laplace_kl(student, teacher, ALL), expected, mean, log_std)
    assert laplace_kl(teacher, teacher, ALL).item() == pytest.approx(0.0, abs=1e-6)


def test_distillation_of_weights_has_the_gradient_of_their_divergence():
    logits, teacher = leaf(3, 5, 1), leaf(3, 5, 1, seed=1).detach()
    flat = torch.zeros(3, 5, 2)
    found = laplace_kl(Mdn(flat, flat, logits), Mdn(flat, flat, teacher), ALL)
    expected = kl_divergence(
        Categorical(logits=teacher[..., 0]), Categorical(logits=logits[..., 0])
    ).mean()
    entropy = Categorical(logits=teacher[..., 0]).entropy().mean()
    check_same(found, expected + entropy, logits)


def test_features_are_compared_by_direction():
    ours, theirs = leaf(3, 6), leaf(3, 6, seed=1).detach()
    dots = (ours * theirs).sum(-1) / (ours.norm(dim=-1) * theirs.norm(dim=-1))
    check_same(feature_distance(ours, theirs, ALL), (1 - dots).mean(), ours)
    assert feature_distance(theirs, 3 * theirs, ALL).item() == pytest.approx(0.0, abs=1e-6)


# -- all together ----------------------------------------------------------------------------------


def labels_of(rows: int) -> dict[str, torch.Tensor]:
    shapes = {
        **{"plan": (33, 15), "lane_lines": (4, 33, 2), "road_edges": (2, 33, 2)},
        **{"lead": (3, 6, 4), "pose": (6,)},
    }
    found: dict[str, Any] = {n: leaf(rows, *s, seed=9).detach() for n, s in shapes.items()}
    found["lane_lines_prob"], found["lead_prob"] = torch.rand(rows, 4), torch.rand(rows, 3)
    found["desire_state"] = F.one_hot(torch.arange(rows) % 8, 8).float()
    names = [*shapes, "desire_state"]
    return {**found, **{f"{name}_valid": torch.ones(rows, dtype=torch.bool) for name in names}}


@pytest.mark.parametrize("generation", ["0.9.7", "2026-07"])
def test_all_terms_have_gradients_and_their_weights(generation: str):
    (kind,) = GENERATIONS[generation]
    outputs = leaf(3, sum(kind.heads.values()))
    found = predictions(outputs, kind.slices)
    weights = LossWeights(1.0, 0.5, 0.5, 0.25, 0.5, 2.0, 0.1)
    terms = driving_terms(found, labels_of(3), ALL, weights)
    assert sorted(terms) == sorted(
        ["plan", "path", "lane_lines", "road_edges", "lead", "desire_state", "pose"]
    )
    total = total_of(terms, weights)
    expected = sum(getattr(weights, name) * value.item() for name, value in terms.items())
    assert total.item() == pytest.approx(expected, rel=1e-5)
    (grad,) = torch.autograd.grad(total, outputs)
    for name in sorted(set(terms) - {"path"}):
        assert grad[:, kind.slices[name]].abs().sum() > 0, name
    assert grad[:, kind.slices["hidden_state"]].abs().sum() == 0


def test_rows_without_a_label_do_not_count():
    (kind,) = GENERATIONS["2026-07"]
    found = predictions(leaf(3, sum(kind.heads.values())), kind.slices)
    labels = labels_of(3)
    labels["plan"][1] = float("nan")
    labels["plan_valid"][1] = False
    weights = LossWeights()
    loss = driving_terms(found, labels, torch.tensor([1.0, 1, 0]), weights)["plan"]
    plan = found["plan"]
    assert isinstance(plan, Mdn)
    expected = laplace_nll(plan.mean[0], plan.log_std[0], labels["plan"][0]).mean()
    torch.testing.assert_close(loss, expected)


def test_distillation_of_all_heads():
    (kind,) = GENERATIONS["2026-07"]
    outputs = leaf(3, sum(kind.heads.values()))
    teacher = predictions(leaf(3, sum(kind.heads.values()), seed=1), kind.slices)
    weights = LossWeights(plan=0.0, distill=1.0, feature=1.0)
    terms = distillation_terms(predictions(outputs, kind.slices), teacher, ALL, weights)
    (grad,) = torch.autograd.grad(total_of(terms, weights), outputs)
    for name, part in kind.slices.items():
        assert (grad[:, part].abs().sum() > 0) == (name != "pad"), name
    same = distillation_terms(teacher, teacher, ALL, weights)
    assert same["feature"].item() == pytest.approx(0.0, abs=1e-6)


def test_what_is_missing_is_named():
    (kind,) = GENERATIONS["2026-07"]
    found = predictions(leaf(1, sum(kind.heads.values())), kind.slices)
    with pytest.raises(UsageError, match="weight for 'lead', and there is no such label"):
        driving_terms(found, {}, torch.ones(1), LossWeights(plan=0.0, lead=1.0))
    with pytest.raises(UsageError, match="weight for 'plan', and the model has no such head"):
        driving_terms({}, labels_of(1), torch.ones(1), LossWeights())
    with pytest.raises(UsageError, match="feature distillation needs hidden_state"):
        distillation_terms({}, found, torch.ones(1), LossWeights(feature=1.0))
    with pytest.raises(UsageError, match="no head of"):
        distillation_terms({}, found, torch.ones(1), LossWeights(distill=1.0))
    for wrong in ({"plan": -1.0}, {"plan": 0.0}, {"plan": float("nan")}):
        with pytest.raises(UsageError, match="expected numbers of 0 or more, and not all 0"):
            LossWeights(**wrong)
