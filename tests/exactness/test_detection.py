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


def averaged(
    images: torch.Tensor,
    boxes: torch.Tensor,
    scale: float,
    height: int,
    width: int,
    samples: int,
    aligned: bool,
) -> torch.Tensor:
    """Average the cells of boxes sample by sample, as torchvision's kernel for the CPU does."""
    made = images.new_zeros(len(boxes), images.shape[1], height, width)
    rows = []
    for index, *corners in boxes.tolist():
        left, top, right, bottom = (c * scale - 0.5 * aligned for c in corners)
        high, wide = (s if aligned else max(s, 1.0) for s in (bottom - top, right - left))
        cells = [
            sum(
                sampled(
                    images[int(index)],
                    top + (row + (i + 0.5) / samples) * high / height,
                    left + (column + (j + 0.5) / samples) * wide / width,
                )
                for i in range(samples)
                for j in range(samples)
            )
            / samples**2
            for row in range(height)
            for column in range(width)
        ]
        rows.append(torch.stack(cells, 1).reshape(-1, height, width))
    return torch.stack(rows) if rows else made


def sampled(image: torch.Tensor, y: float, x: float) -> Any:
    height, width = image.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return image[:, 0, 0] * 0
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    low, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = image[:, top, left] * (left + 1 - x) + image[:, top, right] * (x - left)
    lower = image[:, low, left] * (left + 1 - x) + image[:, low, right] * (x - left)
    return upper * (top + 1 - y) + lower * (y - top)


if not hasattr(torch.ops.torchvision, "roi_align"):
    LIBRARY.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt"
        " pooled_width, int sampling_ratio, bool aligned) -> Tensor"
    )
    LIBRARY.impl("roi_align", averaged, "CPU")
    LIBRARY.impl(
        "roi_align",
        lambda images, boxes, scale, height, width, samples, aligned: images.new_empty(
            boxes.size(0), images.size(1), height, width
        ),
        "Meta",
    )


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


def images_of(x: torch.Tensor) -> torch.Tensor:
    """Return two images of two channels, 12 x 5."""
    return torch.stack([x, x.flip(0), x * x, x + 1]).reshape(2, 2, 12, 5)


def pooled(x: torch.Tensor) -> Any:
    """Average the cells of boxes, as many as data decides, some of them outside of the image."""
    rows = x[x[:, 4] > -0.5]
    boxes = torch.cat([torch.arange(len(rows), device=x.device)[:, None] % 2, rows[:, :4] - 1], 1)
    align = torch.ops.torchvision.roi_align
    few = align(images_of(x), boxes, 0.5, 2, 3, 2, True)
    all_of = torch.cat([torch.zeros(12, 1), x[:, :4] * 3 - 8], 1)
    return few, few.flatten(1).sum(1), align(images_of(x), all_of, 1.0, 1, 2, 1, False)


def of_some_classes(x: torch.Tensor) -> Any:
    """Reshape rows as torchvision's box coder and head do, also where there is no row."""
    rows = x[x[:, 4] > 0.6]
    count = rows.shape[0]
    rows = torch.cat([rows, rows[:, :3]], 1)
    if count > 0:
        rows = rows.reshape(count, -1, 4)
    return rows[:, 1:].reshape(-1, 4)


def few_of_many(x: torch.Tensor) -> Any:
    """Loop over the best three of 720 values: the smaller of two numbers bounds the rounds."""
    values = x.repeat(12, 1).flatten()
    values = values[values > 0]
    total = torch.zeros(())
    for value in values.topk(min(3, values.shape[0]))[0]:
        total = total * 2 + value
    return total


FUNCTIONS = [least, of_all, of_columns, suppress, head]
FUNCTIONS += [of_one_shape, unlike_sides, by_class, distinct, of_each_level]
FUNCTIONS += [pooled, of_some_classes, few_of_many]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_equals_eager(function: Any) -> None:
    inputs = [boxes_of(seed) for seed in range(4)]
    ported = tpuport.convert(function)
    for x in inputs:
        torch.testing.assert_close(tpuport.to_torch(ported(x)), function(x))


def test_no_row_is_reshaped() -> None:
    ported = tpuport.convert(of_some_classes)
    x = boxes_of(0)
    x[:, 4] = 0.0
    assert tpuport.to_torch(ported(x)).shape == of_some_classes(x).shape == (0, 4)


def test_gradient_of_averages() -> None:
    """There is one for the images, and none for the boxes."""

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.images = torch.nn.Parameter(images_of(boxes_of(1)))
            self.moved = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor, align: Any = torch.ops.torchvision.roi_align) -> Any:
            boxes = torch.cat([torch.arange(12.0)[:, None] % 2, x[:, :4] + self.moved], 1)
            return align(self.images.sin(), boxes, 0.7, 2, 2, 2, False).square().sum()

    x, module = boxes_of(2), Pooled()
    module(x, averaged).backward()
    got = tpuport.to_torch(_gradients(tpuport.convert(module, verify=False), x))
    torch.testing.assert_close(got["images"], module.images.grad)
    assert not got["moved"].any()


def test_samples_by_the_size_of_a_box_are_refused() -> None:
    def adaptive(x: torch.Tensor) -> torch.Tensor:
        boxes = torch.cat([torch.zeros(12, 1), x[:, :4]], 1)
        return torch.ops.torchvision.roi_align(images_of(x), boxes, 1.0, 2, 2, -1, True)

    with pytest.raises(tpuport.PortError, match="give a sampling_ratio"):
        tpuport.convert(adaptive, verify=False)(boxes_of(0))


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
