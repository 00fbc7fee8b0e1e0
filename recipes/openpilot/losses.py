"""Losses of a driving model.

Positions are in metres, velocities in m/s, angles in radians. An mdn's `std` is the scale b of a
Laplace distribution, whose density is exp(-|x - mean| / b) / 2b.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F

from recipes.openpilot.constants import POSITION, VELOCITY
from recipes.openpilot.outputs import Mdn, Prediction
from tpuport.foundation.errors import UsageError

# In metres. A smaller deviation would let one label outweigh all others.
LEAST_STD = 1e-2


@dataclass(frozen=True)
class LossWeights:
    """The weights of the terms. A weight of 0 leaves a term out.

    Attributes:
        plan: Weight of `winner_takes_all` of the plan, in nats per number.
        path: Weight of `path_l1` of the plan's positions and velocities, in metres and m/s. The
            likelihood alone moves a mean more slowly the wider its distribution is, so that far
            positions learn last.
        lane_lines: Weight of `masked_l1` of lane lines, in metres, and of their probabilities in
            nats.
        road_edges: Weight of the same for road edges, which have no probabilities.
        lead: Weight of `masked_huber` of leads, in metres and m/s, and of their probabilities in
            nats.
        desire_state: Weight of `cross_entropy` of what the driver wants, in nats.
        pose: Weight of the single-hypothesis likelihood of the pose, in nats per number.
        distill: Weight of `laplace_kl` or cross-entropy to a teacher's heads, in nats per number.
        feature: Weight of `feature_distance` to a teacher's features, from 0 to 2.
    """

    plan: float = 1.0
    path: float = 0.0
    lane_lines: float = 0.0
    road_edges: float = 0.0
    lead: float = 0.0
    desire_state: float = 0.0
    pose: float = 0.0
    distill: float = 0.0
    feature: float = 0.0

    def __post_init__(self) -> None:
        wrong = [f.name for f in fields(self) if not 0 <= getattr(self, f.name) < math.inf]
        if wrong or not any(getattr(self, f.name) for f in fields(self)):
            raise UsageError(f"loss weights {self}: expected numbers of 0 or more, and not all 0")


def masked_mean(each: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the elements that count, or 0 if none does.

    Args:
        each: (..., *shape).
        mask: (...), the leading dims of `each`: the weight of each element, or whether it counts.
    """
    mask = mask.reshape(*mask.shape, *(1,) * (each.ndim - mask.ndim)).to(each.dtype)
    whole = mask.expand(each.shape)
    # Missing labels may be NaN, and NaN times 0 would be NaN.
    kept = torch.where(whole > 0, each, torch.zeros_like(each))
    return (kept * whole).sum() / whole.sum().clamp(min=1e-6)


def laplace_nll(mean: torch.Tensor, log_std: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return minus the logarithm of the density for each number, in nats.

    |target - mean| / b + log 2b with b = exp(log_std), not below `LEAST_STD` (metres, m/s, ...).
    mbalesni/openpilot-pipeline found it better than a Gaussian's.
    """
    log_std = log_std.clamp(min=math.log(LEAST_STD), max=11.0)
    return (target - mean).abs() * (-log_std).exp() + log_std + math.log(2)


def winner_takes_all(mdn: Mdn, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the loss of the best hypothesis and of its weight, in nats per number.

    Only the hypothesis with the highest mean likelihood learns the target, and the weights learn to
    choose it: multiple choice learning (Guzman-Rivera et al., NeurIPS 2012), with the
    classification of multiple-trajectory prediction (Cui et al., arXiv:1809.10732, eq. 1). With one
    hypothesis it is the mean of `laplace_nll`.

    Args:
        mdn: Prediction with or without hypotheses.
        target: (..., *shape); with several choices (..., choices, *shape).
        mask: (...), which targets exist; with several choices (..., choices).
    """
    if mdn.logits is None:
        return masked_mean(laplace_nll(mdn.mean, mdn.log_std, target), mask)
    axis = mdn.logits.ndim - 2  # of the hypotheses
    if mdn.logits.shape[-1] == 1:
        target = target.unsqueeze(axis)  # one choice
        mask = mask.unsqueeze(axis)
    # (..., hypotheses, choices, *shape)
    mean, log_std = mdn.mean.unsqueeze(axis + 1), mdn.log_std.unsqueeze(axis + 1)
    each = laplace_nll(mean, log_std, target.unsqueeze(axis)).flatten(axis + 2).mean(-1)
    best = _one_hot(each.detach().argmin(axis), each.shape[axis]).movedim(-1, axis)
    chosen = torch.where(best > 0, each, torch.zeros_like(each)).sum(axis)
    named = -(best * mdn.logits.log_softmax(axis)).sum(axis)
    return masked_mean(chosen + named, mask)


def _one_hot(index: torch.Tensor, size: int) -> torch.Tensor:
    return F.one_hot(index, size).float()


def masked_l1(mdn: Mdn, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean distance along each axis between a single-hypothesis mdn and its target.

    Args:
        mdn: Prediction such as lane lines, (..., 4, 33, 2), in metres.
        target: Of the same shape.
        mask: Leading dims, such as (..., 4).
    """
    return masked_mean((mdn.mean - target).abs(), mask)


def path_l1(mdn: Mdn, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean distance along each axis of planned positions and velocities.

    Metres and m/s count alike. Of several hypotheses the nearest counts, as in `winner_takes_all`.

    Args:
        mdn: The plan, (..., 33, 15), or (..., 5, 33, 15).
        target: (..., 33, 15).
        mask: (...), which frames count.
    """
    moves = slice(POSITION.start, VELOCITY.stop)
    mean, wanted = mdn.mean[..., moves], target[..., moves]
    if mdn.logits is None:
        return masked_mean((mean - wanted).abs(), mask)
    each = (mean - wanted.unsqueeze(-3)).abs().mean((-1, -2))  # (..., hypotheses)
    return masked_mean(each.amin(-1), mask)


def masked_huber(
    mdn: Mdn, target: torch.Tensor, mask: torch.Tensor, delta: float = 1.0
) -> torch.Tensor:
    """Return Huber's loss (1964): quadratic below `delta` metres, linear above.

    Of several hypotheses the nearest one counts for each choice, and the weights learn to choose
    it, as in `winner_takes_all`.

    Args:
        mdn: Leads, (..., 3, 6, 4), or (..., 2, 6, 4) hypotheses for 3 choices.
        target: (..., 3, 6, 4): x and y in metres, speed in m/s, acceleration in m/s^2.
        mask: (..., 3), which leads exist.
        delta: Where it becomes linear.
    """
    if mdn.logits is None:
        return masked_mean(_huber(mdn.mean - target, delta), mask)
    axis = mdn.logits.ndim - 2
    distance = _huber(mdn.mean.unsqueeze(axis + 1) - target.unsqueeze(axis), delta)
    each = distance.flatten(axis + 2).mean(-1)  # (..., hypotheses, choices)
    best = _one_hot(each.detach().argmin(axis), each.shape[axis]).movedim(-1, axis)
    chosen = torch.where(best > 0, each, torch.zeros_like(each)).sum(axis)
    named = -(best * mdn.logits.log_softmax(axis)).sum(axis)
    return masked_mean(chosen + named, mask)


def _huber(error: torch.Tensor, delta: float) -> torch.Tensor:
    size = error.abs()
    return torch.where(size < delta, 0.5 * error * error, delta * (size - 0.5 * delta))


def binary_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return minus the log-probability of the outcome, in nats. Targets may be between 0 and 1."""
    each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return masked_mean(each, mask)


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return minus the log-probability of a class, in nats.

    Targets are probabilities over the last dim. Where the target is a teacher's softmax, the
    gradient is that of the KL divergence to it.

    Where the target is a teacher's softmax, its gradient is that of the KL divergence to it.
    """
    return masked_mean(-(target * logits.log_softmax(-1)).sum(-1), mask)


def laplace_kl(student: Mdn, teacher: Mdn, mask: torch.Tensor) -> torch.Tensor:
    """Return KL(teacher || student) of Laplace distributions, in nats per number.

    log(b_s / b_t) + (b_t exp(-|d| / b_t) + |d|) / b_s - 1, d the distance of the means (Gil,
    Alajaji and Linder, "Renyi divergence measures", 2013, table 2). It is computed per hypothesis,
    and the cross-entropy of the weights to the teacher's is added.
    """
    low = math.log(LEAST_STD)
    ours, theirs = student.log_std.clamp(low, 11.0), teacher.log_std.clamp(low, 11.0)
    scale, distance = theirs.exp(), (student.mean - teacher.mean).abs()
    spread = (scale * (-distance / scale).exp() + distance) * (-ours).exp()
    found = masked_mean(ours - theirs + spread - 1.0, mask)
    if student.logits is None or teacher.logits is None:
        return found
    weights = teacher.logits.transpose(-1, -2).softmax(-1)
    return found + cross_entropy(student.logits.transpose(-1, -2), weights, mask)


def feature_distance(
    student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return 1 - cosine between features (..., 512), from 0 to 2, which ignores their length.

    This is cosine distillation as in Wang et al., arXiv:2109.15014.
    """
    return masked_mean(1.0 - F.cosine_similarity(student, teacher, dim=-1), mask)


# -- all together ----------------------------------------------------------------------------------

Terms = dict[str, torch.Tensor]


def driving_terms(
    found: Mapping[str, Prediction],
    labels: Mapping[str, torch.Tensor],
    mask: torch.Tensor,
    weights: LossWeights,
) -> Terms:
    """Return each term that has a weight, a head and a label.

    Args:
        found: Result of the model's `predictions`, with leading dims (...).
        labels: `plan` (..., 33, 15), `lane_lines` (..., 4, 33, 2), ... and for each `name_valid`.
        mask: (...), which frames count.
        weights: Weights of the terms.

    Raises:
        UsageError: A term has a weight and the model or the labels lack it.
    """
    terms: Terms = {}
    for term in _TERMS:
        if not getattr(weights, term):
            continue
        name = LABEL_OF.get(term, term)
        if name not in found or name not in labels:
            where = "the model has no such head" if name not in found else "there is no such label"
            raise UsageError(
                f"the loss has a weight for {name!r}, and {where}: give it the weight 0"
            )
        counts = mask.float() * labels[f"{name}_valid"].float()
        terms[term] = _TERMS[term](found, labels, counts)
    return terms


def _plan(found: Any, labels: Any, mask: torch.Tensor) -> torch.Tensor:
    return winner_takes_all(found["plan"], labels["plan"], mask)


def _pose(found: Any, labels: Any, mask: torch.Tensor) -> torch.Tensor:
    return winner_takes_all(found["pose"], labels["pose"], mask)


def _lane_lines(found: Any, labels: Any, mask: torch.Tensor) -> torch.Tensor:
    """Return the loss of lines, weighted by their label's probability, and of that probability."""
    there = labels["lane_lines_prob"]
    loss = masked_l1(found["lane_lines"], labels["lane_lines"], mask.unsqueeze(-1) * there)
    # The second of the two numbers for each line is the logit of its presence.
    logits = found["lane_lines_prob"][..., 1::2]
    return loss + binary_cross_entropy(logits, there, mask)


def _road_edges(found: Any, labels: Any, mask: torch.Tensor) -> torch.Tensor:
    return masked_l1(found["road_edges"], labels["road_edges"], mask)


def _lead(found: Any, labels: Any, mask: torch.Tensor) -> torch.Tensor:
    there = labels["lead_prob"]
    loss = masked_huber(found["lead"], labels["lead"], mask.unsqueeze(-1) * there)
    return loss + binary_cross_entropy(found["lead_prob"], there, mask)


def _desire(found: Any, labels: Any, mask: torch.Tensor) -> torch.Tensor:
    return cross_entropy(found["desire_state"], labels["desire_state"], mask)


def _path(found: Any, labels: Any, mask: torch.Tensor) -> torch.Tensor:
    return path_l1(found["plan"], labels["plan"], mask)


# Terms whose head and label have another name.
LABEL_OF = {"path": "plan"}
_TERMS = {
    **{"plan": _plan, "path": _path, "lane_lines": _lane_lines, "road_edges": _road_edges},
    **{"lead": _lead, "desire_state": _desire, "pose": _pose},
}


def distillation_terms(
    found: Mapping[str, Prediction],
    teacher: Mapping[str, Prediction],
    mask: torch.Tensor,
    weights: LossWeights,
) -> Terms:
    """Return how far the model is from a teacher, over all heads that both have.

    Args:
        found: Result of the model's `predictions`.
        teacher: Predictions of another model. Heads with another layout are left out.
        mask: (...), which frames count.
        weights: Weights of the terms, of which `distill` and `feature` are used.

    Raises:
        UsageError: No head is in both.
    """
    terms: Terms = {}
    if weights.feature:
        ours, theirs = found.get("hidden_state"), teacher.get("hidden_state")
        if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            raise UsageError("feature distillation needs hidden_state of both models")
        terms["feature"] = feature_distance(ours, theirs.detach(), mask)
    if weights.distill:
        each = [
            _distance(name, value, teacher[name], mask)
            for name, value in found.items()
            if name in teacher and name not in ("hidden_state", "pad")
        ]
        known = [value for value in each if value is not None]
        if not known:
            raise UsageError(f"no head of {sorted(found)} is laid out as one of {sorted(teacher)}")
        terms["distill"] = torch.stack(known).mean()
    return terms


def _distance(
    name: str, ours: Prediction, theirs: Prediction, mask: torch.Tensor
) -> torch.Tensor | None:
    if isinstance(ours, Mdn):
        if not isinstance(theirs, Mdn) or ours.mean.shape != theirs.mean.shape:
            return None
        logits = None if theirs.logits is None else theirs.logits.detach()
        still = Mdn(theirs.mean.detach(), theirs.log_std.detach(), logits)
        return laplace_kl(ours, still, mask)
    if isinstance(theirs, Mdn) or ours.shape != theirs.shape:
        return None
    if name in ("desire_state", "desire_pred"):
        return cross_entropy(ours, theirs.detach().softmax(-1), mask)
    return binary_cross_entropy(ours, theirs.detach().sigmoid(), mask)


def total_of(terms: Mapping[str, torch.Tensor], weights: LossWeights) -> torch.Tensor:
    """Return the weighted sum of terms."""
    return torch.stack([getattr(weights, name) * value for name, value in terms.items()]).sum()
