"""What detection heads do: the best of the rows that data chooses, and non-maximum suppression."""

from typing import Any

import jax
import pytest
import torch

import tpuport


def suppressed(boxes: torch.Tensor, scores: torch.Tensor, iou: float) -> torch.Tensor:
    """Suppress boxes one by one, as torchvision's kernel for the CPU does."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    gone = torch.zeros(len(boxes), dtype=torch.bool)
    kept = []
    for i in scores.argsort(descending=True, stable=True).tolist():
        if gone[i]:
            continue
        kept.append(i)
        low = torch.maximum(boxes[i, :2], boxes[:, :2])
        high = torch.minimum(boxes[i, 2:], boxes[:, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        gone |= (shared / (areas[i] + areas - shared)).double() > iou
    return torch.tensor(kept, dtype=torch.int64)


LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.impl("nms", suppressed, "CPU")


def boxes_of(seed: int) -> torch.Tensor:
    """Return boxes with a score each: some overlap, one has no area."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(12, 2, generator=generator) * 6
    sides = torch.rand(12, 2, generator=generator) * 4
    sides[3] = 0
    scores = torch.randperm(12, generator=generator)[:, None] / 6 - 1
    return torch.cat([corners, corners + sides, scores], 1)


def least(x: torch.Tensor) -> torch.Tensor:
    scores = x[:, 4]
    rows = torch.where(scores > 0)[0]
    count = min(3, rows.shape[0])
    return scores[rows].topk(count, largest=False)[0]


def of_all(x: torch.Tensor) -> Any:
    return x[:, 4].topk(int((x[:, 4] > 0).sum()))


def of_columns(x: torch.Tensor) -> Any:
    rows = x[x[:, 4] > 0]
    return rows.topk(min(2, len(rows)), dim=0)[0].sum(0) + rows.topk(2, dim=1)[0].sum()


def suppress(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.torchvision.nms(x[:, :4], x[:, 4], 0.3)


def head(x: torch.Tensor) -> Any:
    """Do what torchvision's heads do with the boxes and scores of one image."""
    boxes, scores = x[:, :4], x[:, 4]
    good = scores > 0.2
    scores, chosen = scores[good], torch.where(good)[0]
    count = min(4, chosen.size(0))
    scores, best = scores.topk(count)
    chosen = chosen[best]
    labels, boxes = chosen % 3, boxes[chosen]
    moved = boxes + (labels.to(boxes) * (boxes.max() + 1))[:, None]
    kept = torch.ops.torchvision.nms(moved, scores, 0.5)[:3]
    return {"boxes": boxes[kept], "scores": scores[kept], "labels": labels[kept]}


def of_one_shape(x: torch.Tensor) -> Any:
    """Return early where there is nothing, as `torchvision.ops.batched_nms` does."""
    rows = x[x[:, 4] > 0.6]
    if rows.numel() == 0:
        return torch.empty((0,))
    return (rows[:, 0] * 2)[:4]


def unlike_sides(x: torch.Tensor) -> Any:
    """Give a size that depends on data from each side, and use it afterwards."""
    rows = x[x[:, 4] > 0]
    kept = rows[rows[:, 0] > 2] if x[0, 0] > x[1, 0] else x[:3] * 2
    kept = kept * 2
    return kept, kept.sum(0), len(kept)


def by_class(x: torch.Tensor) -> Any:
    """Suppress the boxes of each class by themselves, as `torchvision.ops.batched_nms` does."""
    chosen = torch.where(x[:, 4] > -0.5)[0]
    labels, boxes, scores = chosen % 3, x[chosen, :4], x[chosen, 4]
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for label in torch.unique(labels):
        rows = torch.where(labels == label)[0]
        kept[rows[torch.ops.torchvision.nms(boxes[rows], scores[rows], 0.2)]] = True
    found = torch.where(kept)[0]
    return found[scores[found].sort(descending=True)[1]]


def distinct(x: torch.Tensor) -> Any:
    rows = x[x[:, 4] > 0]
    known = (x[:, :2] > 3).long()
    return (
        *(rows[:, 0] / 2).round().unique(return_inverse=True),
        *known.unique(dim=0, return_inverse=True, return_counts=True),
        known.unique(dim=1),
        known.unique_consecutive(dim=0),
    )


def of_each_level(x: torch.Tensor) -> Any:
    """Choose a smaller number twelve times, which are no 4096 paths."""
    kept, total = [], 0
    for level in range(12):
        rows = x[x[:, 4] > level / 12 - 0.5]
        count = min(2, rows.size(0))
        total = max(count, total, 1) + count
        kept.append(rows[:count, 0])
    return torch.cat(kept), total


FUNCTIONS = [least, of_all, of_columns, suppress, head]
FUNCTIONS += [of_one_shape, unlike_sides, by_class, distinct, of_each_level]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_equals_eager(function: Any) -> None:
    inputs = [boxes_of(seed) for seed in range(4)]
    ported = tpuport.convert(function)
    for x in inputs:
        torch.testing.assert_close(tpuport.to_torch(ported(x)), function(x))


def test_too_many_raise() -> None:
    ported = tpuport.convert(lambda x: x[x > 0].topk(2)[0])
    assert tpuport.to_torch(ported(torch.tensor([1.0, 3.0, 2.0]))).tolist() == [3.0, 2.0]
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        ported(torch.tensor([1.0, -3.0, -2.0]))


def test_gradient_of_the_best() -> None:
    """The padding of what was chosen adds nothing."""
    scale = torch.nn.Linear(1, 1)

    class Best(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.scale(x[:, 4:])[:, 0].exp()
            rows = rows[rows > 1]
            return rows.topk(min(4, rows.shape[0]))[0].log().sum()

    x = boxes_of(0)
    module = Best()
    module(x).backward()
    want = [p.grad for p in module.parameters()]
    ported = tpuport.convert(module)
    got = tpuport.to_torch(_gradients(ported, x))
    for name, gradient in zip(("scale.weight", "scale.bias"), want, strict=True):
        torch.testing.assert_close(got[name], gradient)


def _gradients(ported: Any, x: torch.Tensor) -> dict[str, Any]:
    def loss(params: Any) -> Any:
        return ported.apply(params, ported.buffers, jax.random.key(0), x)[0]

    return jax.jit(jax.grad(loss))(ported.params)
