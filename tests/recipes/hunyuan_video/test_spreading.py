"""Every way to spread the denoiser over eight devices gives what one device gives."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from recipes.hunyuan_video.components import Components
from recipes.hunyuan_video.denoise import STEPS, make_noise, make_schedule
from recipes.hunyuan_video.encode import encode
from recipes.hunyuan_video.options import Options
from recipes.hunyuan_video.spreading import SPREADS, choose_spread, spread_of
from tests.recipes.hunyuan_video.denoisers import denoiser_of
from tpuport.foundation.errors import UsageError
from tpuport.sharding import make_mesh

pytestmark = pytest.mark.usefixtures("short")

OPTIONS = Options(("a sign", "rain"), height=64, width=64, frames=5, steps=2, precision="float32")


@pytest.fixture(scope="module")
def components(model_folder: Path) -> Components:
    return Components(model_folder, "float32")


@pytest.fixture(scope="module")
def encoded(components: Components) -> Any:
    return encode(components, OPTIONS)


def latents_of(components: Components, encoded: Any, name: str | None) -> np.ndarray:
    way = None if name is None else spread_of(name)
    noise = make_noise(OPTIONS, 8, (64, 64), torch.float32)
    denoiser = denoiser_of(components, OPTIONS, noise.shape, way=way, encoded=encoded)
    *_, (_, latents) = denoiser.run(noise, make_schedule(components.scheduler(), OPTIONS))
    assert len(latents.sharding.device_set) == (1 if name is None else 8)
    return np.asarray(latents)


@pytest.fixture(scope="module")
def on_one(components: Components, encoded: Any) -> np.ndarray:
    return latents_of(components, encoded, None)


# "guidance" spreads the tokens as "sequence" does; test_weights_are_spread has what "tensor" adds.
@pytest.mark.parametrize(
    "name", [pytest.param(s, marks=[pytest.mark.slow] * (s != "guidance")) for s in SPREADS]
)
def test_eight_devices_give_what_one_gives(
    components: Components, encoded: Any, on_one: np.ndarray, name: str
):
    assert jax.device_count() == 8
    found = latents_of(components, encoded, name)
    assert np.abs(found - on_one).max() / np.abs(on_one).max() < 1e-5


def test_prompts_are_encoded_by_eight_devices(components: Components, encoded: Any):
    found = encode(components, OPTIONS, make_mesh({"fsdp": -1}))
    for name, value in encoded.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)


def test_auto_is_the_way_with_the_shortest_estimate():
    assert choose_spread("auto", 8, 6.0) == "guidance"
    assert choose_spread("auto", 8, 1.0) == "sequence"
    assert choose_spread("auto", 1, 6.0) is None
    assert choose_spread("tensor", 1, 6.0) == "tensor"


def test_weights_are_spread(components: Components):
    """By tensor, a column's weight is on each device in part; by sequence, modulation is."""
    for name, weight in (
        ("tensor", "transformer_blocks.0.ff.net.0.proj.weight"),
        ("sequence", "transformer_blocks.0.norm1.linear.weight"),
    ):
        ported = components.ported("transformer", STEPS, spread_of(name).shard)
        value = ported.buffers[weight]
        assert value.addressable_shards[0].data.size * 8 == value.size


def test_meshes_are_named_and_checked():
    sizes = {name: way.mesh(8) for name, way in SPREADS.items()}
    assert sizes == {
        "sequence": {"sequence": 8},
        "guidance": {"data": 2, "sequence": 4},
        "tensor": {"tensor": 8},
        "mixed": {"sequence": 4, "tensor": 2},
    }
    assert all(make_mesh(one, "cpu").size == 8 for one in sizes.values())
    with pytest.raises(UsageError, match="An even number of chips is needed, and there are 3"):
        SPREADS["guidance"].mesh(3)
    with pytest.raises(UsageError, match="spread='rows': expected one of sequence, guidance"):
        spread_of("rows")
