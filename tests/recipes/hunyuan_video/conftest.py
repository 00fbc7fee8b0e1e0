"""A tiny model of the published layout, once for all tests."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recipes.hunyuan_video import encode
from recipes.hunyuan_video.make_weights import make_weights
from recipes.hunyuan_video.prompts import tokenize
from tests.recipes.hunyuan_video.short import LENGTH


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What make-weights writes."""
    return make_weights(tmp_path_factory.mktemp("hunyuan") / "model")


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of another shape than the video's."""
    pixels = np.random.default_rng(0).integers(0, 256, (90, 170, 3), dtype=np.uint8)
    path = tmp_path_factory.mktemp("picture") / "first.png"
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="module")
def short() -> Iterator[None]:
    """Chats of few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "tokenize", partial(tokenize, max_length=LENGTH))
        yield
