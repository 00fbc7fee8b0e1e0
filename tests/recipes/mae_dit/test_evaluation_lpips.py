"""LPIPS: published files are read, and its values are those of a second implementation."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import tpuport
from recipes.mae_dit.evaluation.lpips import LPIPS, load_lpips
from tpuport.foundation.errors import CheckpointError, UsageError

_FEATURES = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512)


@pytest.fixture(scope="module")
def model() -> LPIPS:
    return LPIPS(seed=3)


def _reference(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute LPIPS by hand from the files' own names, in float64."""

    def features(image: torch.Tensor) -> list[torch.Tensor]:
        shift = torch.tensor([-0.030, -0.088, -0.188], dtype=torch.float64)
        scale = torch.tensor([0.458, 0.448, 0.450], dtype=torch.float64)
        h = ((image.double().movedim(1, -1) - shift) / scale).movedim(-1, 1)
        index, kept = 0, []
        for layer in _FEATURES:
            if layer == "M":
                kept.append(h)
                h, index = F.max_pool2d(h, 2), index + 1
                continue
            weight, bias = (weights[f"features.{index}.{n}"].double() for n in ("weight", "bias"))
            h, index = F.conv2d(h, weight, bias, padding=1).relu(), index + 2
        return [*kept, h]

    total = torch.zeros(len(x), dtype=torch.float64)
    for number, (a, b) in enumerate(zip(features(x), features(y), strict=True)):
        a, b = (v / (v.norm(dim=1, keepdim=True) + 1e-10) for v in (a, b))
        head = weights[f"lin{number}.model.1.weight"].double()
        total += F.conv2d((a - b) ** 2, head).mean((1, 2, 3))
    return total


def _published(model: LPIPS) -> dict[str, torch.Tensor]:
    """Return the weights by the names of the two published files together."""
    return {
        "features." + name.split(".", 2)[2] if name.startswith("net.") else name: value
        for name, value in model.state_dict().items()
        if not name.startswith("scaling_layer")
    }


def test_equals_a_second_implementation_and_the_port(model: LPIPS) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(2, 3, 40, 24) * 2 - 1, torch.rand(2, 3, 40, 24) * 2 - 1
    want = _reference(_published(model), x, y)
    assert want.min() > 0.1
    torch.testing.assert_close(model(x, y).double(), want, rtol=1e-4, atol=0)
    ported = tpuport.convert(model)
    torch.testing.assert_close(tpuport.to_torch(ported(x, y)).double(), want, rtol=1e-4, atol=0)
    assert model(x, x).abs().max() == 0


@pytest.mark.filterwarnings("ignore::UserWarning")  # torchvision's, about how it is called
def test_equals_the_package(model: LPIPS) -> None:
    lpips = pytest.importorskip("lpips")
    theirs = lpips.LPIPS(net="vgg", pretrained=False, pnet_rand=True, verbose=False)
    theirs.load_state_dict(model.state_dict(), strict=False)
    torch.manual_seed(0)
    x, y = torch.rand(2, 3, 64, 48) * 2 - 1, torch.rand(2, 3, 64, 48) * 2 - 1
    torch.testing.assert_close(model(x, y), theirs(x, y).flatten(), rtol=1e-6, atol=0)


def test_a_pixel_without_an_active_channel_has_a_gradient(model: LPIPS) -> None:
    dead = LPIPS(seed=3)
    dead.net.slice1[0].bias.fill_(-1e3)  # no channel is active anywhere
    x = torch.rand(1, 3, 16, 16).requires_grad_()
    dead(x, torch.rand(1, 3, 16, 16)).sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_reads_the_published_files(model: LPIPS, tmp_path: Path) -> None:
    published = _published(model)
    vgg, heads, lines = tmp_path / "vgg16.pth", tmp_path / "heads.pth", []
    torch.save(
        {n: v for n, v in published.items() if n.startswith("features")}
        | {"classifier.0.weight": torch.zeros(2, 2)},
        vgg,
    )
    torch.save({n: v for n, v in published.items() if n.startswith("lin")}, heads)
    found = load_lpips(vgg, heads, say=lines.append)
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert not lines
    load_lpips(None, None, say=lines.append)
    assert "random weights" in lines[0]


def test_refuses_other_files(model: LPIPS, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.pth is not there. What to do: download vgg16"):
        load_lpips(tmp_path / "gone.pth", tmp_path / "heads.pth", say=print)
    with pytest.raises(UsageError, match="no heads"):
        load_lpips(tmp_path / "vgg.pth", None, say=print)
    other = tmp_path / "other.pth"
    torch.save({"features.0.weight": torch.zeros(64, 3, 3, 3)}, other)
    with pytest.raises(CheckpointError, match="Missing key"):
        load_lpips(None, other, say=print)
    other.write_bytes(b"no torch file")
    with pytest.raises(CheckpointError, match="other.pth"):
        load_lpips(None, other, say=print)
