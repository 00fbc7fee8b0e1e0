"""The Inception network of FID: the graph, its names, and pytorch-fid's own code."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import tpuport
from recipes.mae_dit.evaluation.inception import FIDInception, load_inception
from tpuport.foundation.errors import CheckpointError, UsageError


@pytest.fixture(scope="module")
def model() -> FIDInception:
    """Return a network whose batch norms do something."""
    made = FIDInception(seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, value in made.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            value += 0.1 * (torch.rand(value.shape, generator=generator) - 0.5)
    return made


def test_the_port_equals_eager(model: FIDInception) -> None:
    torch.manual_seed(0)
    images = torch.rand(1, 3, 40, 56)
    with torch.no_grad():
        want = model(images)
    assert [tuple(v.shape) for v in want] == [(1, 2048), (1, 2023), (1, 1008)]
    assert all(v.std() > 0.01 for v in want)
    found = tpuport.to_torch(tpuport.convert(model, verify=False)(images))
    for name, a, b in zip(want._fields, want, found, strict=True):
        assert (a - b).abs().max() < 1e-4 * a.abs().max(), name


@pytest.mark.filterwarnings("ignore")
def test_equals_pytorch_fid(model: FIDInception, monkeypatch: pytest.MonkeyPatch) -> None:
    inception = pytest.importorskip("pytorch_fid.inception")
    weights = model.state_dict()
    monkeypatch.setattr(inception, "load_state_dict_from_url", lambda *a, **k: weights)
    theirs = inception.InceptionV3([3]).eval()
    classes = inception.fid_inception_v3().eval()
    images = (torch.rand(2, 3, 40, 56, generator=torch.Generator().manual_seed(0)) * 255).round()
    with torch.no_grad():
        found, (want,) = model(images / 255), theirs(images / 255)
        resized = F.interpolate(images / 255, (299, 299), mode="bilinear", align_corners=False)
        logits = classes(2 * resized - 1)
    assert (found.pool[0] - found.pool[1]).abs().mean() > 1e-3
    torch.testing.assert_close(found.pool, want.flatten(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.logits, logits, rtol=1e-4, atol=1e-4)


def test_pooling_is_that_of_the_graph(model: FIDInception) -> None:
    """A constant stays a constant under a mean that leaves out the padding."""
    constant = torch.full((1, 192, 5, 5), 2.0)
    assert torch.equal(model.Mixed_5b._pooled(constant), constant)
    peak = torch.zeros(1, 4, 5, 5)
    peak[:, :, 2, 2] = 9
    assert (model.Mixed_7c._pooled(peak) == 9).sum() == 4 * 9
    assert model.Mixed_7b._pooled(peak).max() == 1


def test_resizes_as_tensorflow_did() -> None:
    """Places are multiples of the ratio: 2 pixels to 299 stay at the last from the middle on."""
    model = FIDInception(preparation="tensorflow")
    seen = []
    hook = model.Conv2d_1a_3x3.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    row = torch.tensor([0.0, 1.0]).expand(1, 3, 2, 2)
    model(row)
    hook.remove()
    places = (torch.arange(299) * 2 / 299).clamp(max=1)
    torch.testing.assert_close(seen[0][0, 0, 7], (255 * places - 128) / 128, rtol=1e-5, atol=1e-5)


def test_reads_the_published_file(model: FIDInception, tmp_path: Path) -> None:
    path, lines = tmp_path / "inception.pth", []
    weights = model.state_dict()
    torch.save({n: v for n, v in weights.items() if "num_batches" not in n}, path)
    found = load_inception(path, say=lines.append)
    assert all(torch.equal(v, weights[n]) for n, v in found.state_dict().items())
    assert not lines
    load_inception(None, say=lines.append)
    assert "random weights" in lines[0]
    with pytest.raises(UsageError, match="download pt_inception"):
        load_inception(tmp_path / "gone.pth", say=print)
    torch.save({"fc.weight": weights["fc.weight"]}, path)
    with pytest.raises(CheckpointError, match="Missing key"):
        load_inception(path, say=print)
