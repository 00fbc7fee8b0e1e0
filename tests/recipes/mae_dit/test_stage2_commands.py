"""The commands of stage 2: from images to measures, on after a kill, and errors for bad inputs."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tpuport
from recipes.mae_dit import data, generation, measures
from recipes.mae_dit.__main__ import app
from recipes.mae_dit.config import load
from recipes.mae_dit.generation import Sources
from recipes.mae_dit.make_data import make_data
from recipes.mae_dit.models import make_autoencoder, make_stage2
from recipes.mae_dit.runs import Given, latent_statistics
from recipes.mae_dit.stage2.latents import Cached
from recipes.mae_dit.weights import MODEL
from tests.recipes.killing import cached_in, kill_when
from tests.recipes.mae_dit.tiny import Difference, Means, Patches, write
from tpuport.foundation.errors import CheckpointError, UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ten images, a configuration, a run of stage 1, statistics and a cache of its latents.

    What is compiled is kept for the tests after it, and for the process that is killed.
    """
    folder = tmp_path_factory.mktemp("stage2")
    make_data(folder / "data", count=10, size=20)
    path = write(folder)
    given, sources = Given(path, folder / "data"), Sources(folder / "stage1")
    with tpuport.compile_cache(folder / "programs", min_compile_seconds=0.0):
        latent_statistics(given, folder / "stage1").save(folder / "stats.npz")
        assert generation.cache(given, sources, folder / "cache") == (10, 0)
        yield folder


NORMALISED = "arch.do_normalize=true"


def given(folder: Path, *overrides: str) -> Given:
    return Given(folder / "stage2.yaml", folder / "data", (NORMALISED, *overrides))


def weights(run: Path) -> dict[str, torch.Tensor]:
    opened = tpuport.open_checkpoint(run / MODEL)
    return {name: opened.read(name) for name in opened}


def test_a_cache_has_the_bits_of_the_encoder(folder):
    cached = Cached(folder / "cache")
    found = data.pictures(load(folder / "stage2.yaml"), folder / "data", "train", train=False)
    assert cached.labels.tolist() == [entry.label for entry in found.entries]
    stage_1 = Patches().eval()
    stage_1.load_state_dict(
        {n.removeprefix("stage_1_model."): v for n, v in weights(folder / "stage1").items()}
    )
    ported = tpuport.convert(stage_1.encoder, verify=False)
    for start in (0, 4):  # in batches of four, as the cache was written
        images = torch.stack([found[i]["image"] for i in range(start, start + 4)])
        zs = torch.stack([cached[i]["latent"] for i in range(start, start + 4)])
        assert torch.equal(tpuport.to_torch(ported(images)), zs)


def test_the_commands_lead_from_images_to_measures(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(measures, "load_inception", lambda *_, **__: Means().eval())
    monkeypatch.setattr(measures, "load_lpips", lambda *_, **__: Difference().eval())
    monkeypatch.setattr(generation, "load_inception", lambda *_, **__: Means().eval())
    config, stage1 = str(folder / "stage2.yaml"), ["--stage1", str(folder / "stage1")]
    latents = [*stage1, "--stats", str(folder / "stats.npz"), "--set", NORMALISED]
    images, run, out = ["--data", str(folder / "data")], str(tmp_path / "run"), tmp_path / "m.json"

    def do(command: str, *arguments: str) -> str:
        done = CliRunner().invoke(app, [command, config, *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    cached = ["--cache", str(folder / "cache"), "-o", run, "--grid-every", "4"]
    while_training = ["--evaluate-every", "2", "--evaluate-count", "7"]
    said = do("stage2", *latents, *cached, *images, *while_training)
    assert "statistics of 10 images" in said
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    curve = {line["step"]: line["evaluate/FID"] for line in lines if "evaluate/FID" in line}
    assert [*curve] == [2, 4, 6]
    drawn = (tmp_path / "run" / "fid.svg").read_text()
    assert all(f"step {step}: FID {value:.4g}" in drawn for step, value in curve.items())
    assert sorted(p.name for p in (tmp_path / "run" / "grids").iterdir()) == [
        "step-000004.png",
        "step-000006.png",
    ]
    given = ["stage2", config, *latents, *cached, *images, *while_training]
    refused = CliRunner().invoke(app, [*given, "--preparation", "tensorflow"])
    assert "preparation was 'pytorch', is 'tensorflow'" in " ".join(refused.output.split())
    said = do("sample", *latents, "--untrained", "--count", "3", "-o", str(tmp_path / "before"))
    assert "untrained" in said
    samples = tmp_path / "samples"
    how = ["--sampler", "ddim", "--guidance", "2", "--count", "6", "-o", str(samples)]
    do("sample", *latents, "--run", run, *how)
    with np.load(samples / "samples.npz") as file:
        assert (file["arr_0"].shape, file["arr_0"].dtype) == ((6, 16, 16, 3), np.uint8)
        assert file["arr_1"].tolist() == [0, 1, 2, 3, 0, 1]
    reference = ["--write-reference", str(tmp_path / "reference.npz")]
    files = ["--samples", str(samples / "samples.npz"), "-o", str(out)]
    do("evaluate", *stage1, *images, *files, *reference)
    found = json.loads(out.read_text())
    of_samples = {"FID", "sFID", "IS", "precision", "recall"}
    assert found.keys() == of_samples | {"rFID", "PSNR", "SSIM", "LPIPS"}
    assert np.isfinite([*found.values()]).all()
    # The last evaluation of the run is that of its samples.
    how = ["--count", "7", "-o", str(tmp_path / "last")]
    do("sample", *latents, "--run", run, *how)
    last = ["--samples", str(tmp_path / "last" / "samples.npz"), "-o", str(tmp_path / "last.json")]
    do("evaluate", *last, "--reference", str(tmp_path / "run" / "reference.npz"))
    assert json.loads((tmp_path / "last.json").read_text())["FID"] == pytest.approx(curve[6])
    do("evaluate", *files, "--reference", str(tmp_path / "reference.npz"))
    again = json.loads(out.read_text())
    assert again == pytest.approx({name: found[name] for name in of_samples})


def test_images_and_their_cache_train_alike(folder, tmp_path):
    """Without random changes of images, both ways see the same latents in the same order."""
    sources = Sources(folder / "stage1", folder / "stats.npz")
    runs = {}
    for name, cache in (("images", None), ("cache", folder / "cache")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np.random, "random", lambda: 1.0)  # no flips
            part = Sources(sources.stage1, sources.stats, cache)
            generation.train(given(folder), part, tmp_path / name, limit=3)
        runs[name] = weights(tmp_path / name)
    for name, value in runs["images"].items():
        torch.testing.assert_close(runs["cache"][name], value, rtol=1e-5, atol=1e-6)


SCRIPT = """
import time
from recipes.mae_dit.stage2 import latents
from recipes.mae_dit.__main__ import app
read = latents.Cached.__getitem__
latents.Cached.__getitem__ = lambda self, index: time.sleep(0.05) or read(self, index)
app()
"""


def test_a_killed_run_goes_on_to_the_same_bits(folder, tmp_path):
    sources = Sources(folder / "stage1", folder / "stats.npz", folder / "cache")
    generation.train(given(folder), sources, tmp_path / "whole")
    out = tmp_path / "killed"
    arguments = ["stage2", str(folder / "stage2.yaml"), "-o", str(out), "--set", NORMALISED]
    arguments += ["--data", str(folder / "data"), "--stage1", str(folder / "stage1")]
    arguments += ["--stats", str(folder / "stats.npz"), "--cache", str(folder / "cache")]

    def has_state() -> bool:
        return any(one.name.isdigit() for one in out.glob("states/*"))

    # A copy: what is killed may leave half a program, which jax warns of and compiles anew.
    programs = shutil.copytree(folder / "programs", tmp_path / "programs")
    kill_when(
        has_state,
        *("-c", SCRIPT, *arguments),
        **cached_in(programs),
    )
    assert not (out / MODEL).exists()
    generation.train(given(folder), sources, out)
    expected, found = weights(tmp_path / "whole"), weights(out)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_cache_that_was_killed_encodes_what_is_missing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "_ROWS", 4)
    sources, part = Sources(folder / "stage1"), given(folder)
    generation.cache(part, sources, tmp_path / "cache")
    shards = sorted((tmp_path / "cache").glob("*.safetensors"))
    assert [len(Cached(tmp_path / "cache")), len(shards)] == [10, 3]
    kept = {path: path.stat().st_mtime_ns for path in shards}
    shards[1].unlink()
    (tmp_path / "cache" / "index.json").unlink()
    with pytest.raises(UsageError, match="no finished cache"):
        Cached(tmp_path / "cache")
    generation.cache(part, sources, tmp_path / "cache")
    new = {path for path in shards if path.stat().st_mtime_ns != kept[path]}
    assert new == {shards[1]}
    for i in range(10):
        assert torch.equal(
            Cached(tmp_path / "cache")[i]["latent"], Cached(folder / "cache")[i]["latent"]
        )
    shards[2].write_bytes(b"broken")
    with pytest.raises(
        CheckpointError, match=r"000002\.safetensors cannot be read.*run cache again"
    ):
        Cached(tmp_path / "cache")


def refused(match: str, run: Any) -> None:
    with pytest.raises((UsageError, CheckpointError), match=match):
        run()


def test_what_does_not_fit_is_named(folder, tmp_path):
    stage1, stats = folder / "stage1", folder / "stats.npz"
    whole, out = Sources(stage1, stats, folder / "cache"), tmp_path / "run"

    def train(sources: Sources, *overrides: str) -> Any:
        return lambda: generation.train(given(folder, *overrides), sources, out)

    classes = "arch.stage_2.params.num_classes=3"
    refused(r"label 3 of sample \d.*0 to 2", train(whole, classes))
    refused("do_normalize is true.*--stats", train(Sources(stage1)))
    refused("do_normalize is false", train(whole, "arch.do_normalize=false"))
    refused("stage 1 has random weights", train(Sources(None, stats)))
    refused("none.model.safetensors is not there", train(Sources(tmp_path / "none", stats)))
    refused(
        r"stage2\.yaml cannot be read.*run stats", train(Sources(stage1, folder / "stage2.yaml"))
    )
    refused(
        "latents of another transforms", train(whole, "dataset.transforms.type=imagenetMAE16x16")
    )
    refused("learn_sigma", train(whole, "arch.stage_2.params.process=flow"))
    refused("less than one batch", train(whole, "experiment.batch_size=11"))
    missing = "arch.stage_2.ckpt_path=none.pt"
    refused(r"arch\.stage_2\.ckpt_path: none\.pt is not there.*null", train(whole, missing))
    other = f"arch.stage_2.ckpt_path={stage1 / MODEL}"
    refused("of another configuration: .* are missing, such as", train(whole, other))

    def sample(**how: Any) -> Any:
        return lambda: generation.sample(
            given(folder), Sources(stage1, stats), None, out, count=4, **how
        )

    refused("sampler='euler': expected ddpm or ddim", sample(sampler="euler"))
    refused("sampling steps", sample(steps=1))

    def evaluate(**wanted: Any) -> Any:
        return lambda: measures.evaluate(
            given(folder), measures.Wanted(**wanted), measures.Published()
        )

    refused("nothing to measure", evaluate())
    refused("none.npz is not there", evaluate(samples=tmp_path / "none.npz"))
    (tmp_path / "broken.npz").write_bytes(b"PK\3\4" + b"0" * 40)
    refused("broken.npz cannot be read", evaluate(samples=tmp_path / "broken.npz"))
    broken = {"samples": stats, "reference": tmp_path / "broken.npz"}
    refused("broken.npz cannot be read", evaluate(**broken))
    refused(r"stats\.npz has no arr_0", evaluate(samples=stats))
    refused("and no 'mu'", evaluate(samples=stats, reference=stats))


def test_weights_are_read_from_the_files_that_are_named(folder, tmp_path):
    """`ckpt_path` of a part, and one of all parts with upstream's names."""
    path = folder / "stage2.yaml"
    config = load(path, ["seed=5"])
    model, autoencoder = make_stage2(config), make_autoencoder(config)
    parts = {f"stage_2_model.{n}": v for n, v in model.state_dict().items()}
    torch.save({**autoencoder.state_dict(), **parts}, tmp_path / "all.pt")
    torch.save(model.state_dict(), tmp_path / "part.pt")
    for override in ("arch.ckpt_path=all.pt", "arch.stage_2.ckpt_path=part.pt"):
        named = override.replace("=", f"={tmp_path}/")
        found = make_stage2(load(path, [named]))
        for name, value in found.state_dict().items():
            assert torch.equal(value, model.state_dict()[name])
    found = make_autoencoder(load(path, [f"arch.ckpt_path={tmp_path}/all.pt"]))
    name = "stage_1_model.encoder.weight"
    assert torch.equal(found.state_dict()[name], autoencoder.state_dict()[name])
