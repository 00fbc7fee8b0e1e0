"""Model files and a route that many tests read, each written once."""

import functools
import importlib.util
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _one_thread_of_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for torch: several wait for each other without giving up their cores."""
    if importlib.util.find_spec("onnxruntime") is None:
        return
    import onnxruntime

    class OneThread(onnxruntime.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = 1

    monkeypatch.setattr(onnxruntime, "SessionOptions", OneThread)


@pytest.fixture(scope="session", autouse=True)
def _optimized_warping() -> Iterator[None]:
    """Let LLVM optimize the one program here that computes for longer than it is compiled.

    As it is else in tests, a frame takes eight times as long. The setting is one of the process:
    threads that warp frames side by side must not put back what another one has set.
    """
    import jax

    from recipes.openpilot import assembling

    warp, one_at_a_time = assembling.prepare_frames, threading.Lock()

    def optimized(*given: Any, **options: Any) -> jax.Array:
        with one_at_a_time:
            before = jax.config.read("jax_disable_most_optimizations")
            jax.config.update("jax_disable_most_optimizations", False)
            try:
                return warp(*given, **options)
            finally:
                jax.config.update("jax_disable_most_optimizations", before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembling, "prepare_frames", optimized)
        yield


@pytest.fixture(scope="session")
def driving_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Path]]:
    """The files of a generation: `driving_models("2026-07", opset=20, fp16=False)`."""
    from recipes.openpilot.make_model import make_model

    @functools.cache
    def make(generation: str, *, opset: int = 20, fp16: bool = False) -> list[Path]:
        folder = tmp_path_factory.mktemp(f"model-{generation}-{opset}-{fp16}")
        return make_model(folder, generation, opset=opset, fp16=fp16)

    return make


@pytest.fixture(scope="session")
def marked_route(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one segment whose frames are numbered; do not write there."""
    pytest.importorskip("openpilot_logging")
    from recipes.openpilot import make_data
    from tests.recipes.openpilot.routes import OPTIONS

    root = tmp_path_factory.mktemp("marked")
    make_data.make_route(root, OPTIONS)
    return root


@pytest.fixture
def segment(marked_route: Path, tmp_path: Path) -> Path:
    """The segment's folder, to be changed."""
    (found,) = marked_route.iterdir()
    return Path(shutil.copytree(found, tmp_path / "routes" / found.name))
