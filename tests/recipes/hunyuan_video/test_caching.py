"""Steps that reuse blocks' results: the same as eager PyTorch with its blocks patched likewise."""

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from recipes.hunyuan_video.caching import Kept, StepCache
from recipes.hunyuan_video.components import Components
from recipes.hunyuan_video.denoise import make_noise, make_schedule
from recipes.hunyuan_video.encode import encode
from recipes.hunyuan_video.options import Options, size_of
from tests.recipes.hunyuan_video.denoisers import denoiser_of
from tests.recipes.hunyuan_video.eager import pipeline, relative
from tests.recipes.hunyuan_video.short import LENGTH
from tpuport.aot.cache.compile_cache import CacheReport, watching
from tpuport.foundation.errors import UsageError

pytestmark = pytest.mark.usefixtures("short")

OPTIONS = Options(
    ('a sign that says "open"',),
    negative_prompt="blurred",
    height=48,
    width=64,
    frames=5,
    steps=8,
    precision="float32",
    cache_start=2,
    cache_end=7,
    cache_interval=3,
)
FULL = {0, 1, 2, 5, 7}


@pytest.fixture(scope="module")
def encoded(model_folder: Path) -> Any:
    return encode(Components(model_folder, "float32"), OPTIONS)


class Ran(NamedTuple):
    """The noise, the latents after each step, and the last of a run that goes on from step 5."""

    noise: torch.Tensor
    found: list[np.ndarray]
    again: np.ndarray


def run(folder: Path, encoded: Any, calls: int = 1, **changes: Any) -> Ran:
    options = dataclasses.replace(OPTIONS, **changes)
    components = Components(folder, options.precision)
    noise = make_noise(options, 8, size_of(options), torch.float32)
    denoiser = denoiser_of(components, options, noise.shape, calls=calls, encoded=encoded)
    schedule = make_schedule(components.scheduler(), options)
    kept, later = (denoiser.cache and Kept(denoiser.cache) for _ in range(2))
    found: list[np.ndarray] = []
    for done, latents in denoiser.run(jnp.copy(noise), schedule, 0, kept):
        found.append(np.array(latents))
        if kept and later and done == 5:
            later.restore({name: jnp.array(value) for name, value in kept.saved().items()})
    *_, (_, again) = denoiser.run(jnp.array(found[4]), schedule, 5, later)
    return Ran(torch.from_numpy(np.array(noise)), found, np.array(again))


@pytest.fixture(scope="module")
def full(model_folder: Path, encoded: Any) -> list[np.ndarray]:
    return run(model_folder, encoded).found


class Patched:
    """Blocks that look at a count of steps: the caches as they are described, in PyTorch.

    Args:
        transformer: diffusers', whose guider calls it twice a step.
        kind: of cache.
    """

    def __init__(self, transformer: Any, kind: str) -> None:
        self.kind, self.calls, self.kept = kind, 0, {}
        self.forward, self.last = transformer.forward, len(transformer.transformer_blocks) - 1
        transformer.forward = self.call
        for index, block in enumerate(transformer.transformer_blocks):
            block.forward = partial(self.block, index, block.forward)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        found = self.forward(*args, **kwargs)
        self.calls += 1
        return found

    def block(self, index: int, forward: Any, hidden: Any, text: Any, *rest: Any) -> Any:
        step, half = divmod(self.calls, 2)
        if step in FULL:
            self.kept[half, index] = hidden, text
            found = forward(hidden, text, *rest)
            entered = self.kept[half, 0]
            self.kept[half, "added"] = [a - b for a, b in zip(found, entered, strict=True)]
            if index == self.last and step > 0:
                self.differences(half, step, found[0])
                self.kept[half, "text"] = found[1]
            return found
        if index < self.last:
            return hidden, text
        if self.kind == "deepcache":
            return forward(*self.kept[half, index], *rest)
        if self.kind == "taylorcache":
            at, known = self.kept[half, "differences"]
            terms = [d * (step - at) ** n / math.factorial(n) for n, d in enumerate(known)]
            return sum(terms), self.kept[half, "text"]
        return [a + b for a, b in zip((hidden, text), self.kept[half, "added"], strict=True)]

    def differences(self, half: int, step: int, value: Any) -> None:
        """The value, its slope, and the slope of that, from one full step to the next."""
        at, known = self.kept.get((half, "differences"), (step, []))
        found = [value]
        for before in known[:2]:
            found.append((found[-1] - before) / (step - at))
        self.kept[half, "differences"] = step, found


# "teacache" has both halves in one call, too.
@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        pytest.param("deepcache", 1, marks=pytest.mark.slow),
        ("deepcache", 2),
        ("teacache", 1),
        ("taylorcache", 1),
    ],
)
def test_latents_are_those_of_patched_blocks(
    model_folder: Path, encoded: Any, full: list[np.ndarray], kind: str, calls: int
):
    report = CacheReport("")
    with watching(report):
        noise, found, again = run(model_folder, encoded, calls, cache=kind)
    # Two programs serve all steps.
    assert [p.name for p in report.programs if "step" in p.name] == ["step", "cached_step"]
    eager = pipeline(model_folder, OPTIONS)
    eager.tokenizer_max_length = LENGTH
    Patched(eager.transformer, kind)
    wanted = eager(
        prompt=list(OPTIONS.prompts),
        negative_prompt=[OPTIONS.negative_prompt],
        num_frames=OPTIONS.frames,
        num_inference_steps=OPTIONS.steps,
        latents=noise,
        output_type="latent",
        height=OPTIONS.height,
        width=OPTIONS.width,
    ).frames
    assert relative(found[-1], wanted) < 1e-4
    # It is another result than that of all blocks, and not far from it.
    assert 1e-3 < relative(found[-1], torch.from_numpy(full[-1])) < 0.5
    # What is saved of five steps is all that the others need.
    np.testing.assert_array_equal(again, found[-1])
    # Until a step reuses something, nothing changes.
    assert relative(found[2], torch.from_numpy(full[2])) < 1e-6
    assert relative(found[3], torch.from_numpy(full[3])) > 1e-6


def test_steps_are_upstreams():
    cache = StepCache()
    full = [step for step in range(50) if cache.is_full(step)]
    # hyvideo, pipelines/hunyuan_video_pipeline.py, no_cache_steps
    assert full == [*range(11), *range(11, 45, 4), *range(45, 50)]
    assert len(full) == 25
    assert StepCache(start=0, end=4, interval=3).is_full(0)
    assert all(StepCache(start=0, interval=1).is_full(step) for step in range(50))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cache": "tailor"}, "cache='tailor': expected one of deepcache, teacache, taylorcache"),
        ({"cache_start": 9, "cache_end": 3}, "cache_start=9 and cache_end=3: expected 0 <= start"),
        ({"cache_interval": 0}, "cache_interval=0: expected at least 1"),
        ({"cache": "taylorcache", "cache_start": 0}, "cache_start=0 with taylorcache: expected at"),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, Any], said: str):
    with pytest.raises(UsageError, match=said):
        dataclasses.replace(OPTIONS, **{"cache": "deepcache", **changes})
