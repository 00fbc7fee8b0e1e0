"""The benchmark of openpilot's models: everyone computes and trains the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("onnxruntime")

from benchmarks import openpilot as benchmark
from recipes.openpilot.make_model import make_model

SMALLEST = benchmark.Sizes(frames=2, batch=1, warmup=1, length=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_model(tmp_path_factory.mktemp("model"), "0.10.3")


# Runs of the benchmark are slow, as those of `python -m benchmarks`; what they check is below.
@pytest.mark.slow
def test_teachers_say_the_same(files: list[Path], capsys: pytest.CaptureFixture[str]):
    ways = benchmark.teachers(files, SMALLEST.frames)
    jitted = benchmark.JITTED.format(1)
    assert list(ways) == [benchmark.ONNX, benchmark.ALONE, jitted]
    found = {name: way() for name, way in ways.items()}
    assert found[jitted].shape == (2, 2576)
    benchmark.check_outputs(found)
    benchmark.show_teachers(files, SMALLEST.frames, rounds=1)
    said = capsys.readouterr().out
    assert said.count("frames/s") == 3
    assert "times as fast as onnxruntime" in said


@pytest.mark.slow
def test_steps_train_alike(
    files: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    unrolled = benchmark.unrolled

    def told(body: Any, carry: Any, xs: Any, **options: Any) -> Any:
        print(f"{len(xs[2])} frames")  # noqa: T201
        return unrolled(body, carry, xs, **options)

    monkeypatch.setattr(benchmark, "unrolled", told)
    benchmark.show_steps(files, SMALLEST, rounds=1, compiles=1)
    said = capsys.readouterr().out
    # Of the frames that fill the queues, and of those that count; no scan is left.
    assert said.count("1 frames\n") == 2
    assert said.count("ms a step") == 3
    assert said.count("s to compile\n") == 2
    assert "times as fast as eager PyTorch" in said


def test_what_differs_is_told():
    outputs = np.random.default_rng(0).normal(size=(2, 2576)).astype(np.float32)
    jitted = benchmark.JITTED.format(1)
    found = {benchmark.ONNX: outputs, benchmark.ALONE: outputs, jitted: outputs + np.float32(1)}
    with pytest.raises(RuntimeError, match=r"jitted port, 1 at once: .* from onnxruntime"):
        benchmark.check_outputs(found)
    benchmark.check_outputs({**found, jitted: outputs})
    losses = {benchmark.SCAN: [1.0, 0.9], benchmark.EAGER: [1.0, 0.91]}
    with pytest.raises(RuntimeError, match="eager PyTorch with PEFT: losses"):
        benchmark.check_losses(losses)
