"""What a run may be asked for, and the sizes of its videos."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recipes.hunyuan_video.__main__ import app
from recipes.hunyuan_video.options import Options, parse_aspect, size_of
from tpuport.foundation.errors import UsageError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": ()}, "prompts: expected at least one"),
        ({"task": "t2i"}, "task='t2i': expected one of t2v, i2v"),
        ({"task": "i2v"}, "task='i2v' with no image"),
        ({"image": "x.png"}, "task='t2v' with image='x.png'"),
        ({"task": "i2v", "image": "missing.png"}, "image='missing.png' is not there"),
        ({"resolution": "4k"}, "resolution='4k': expected one of 360p, 480p, 720p, 1080p"),
        ({"frames": 120}, r"frames=120: expected 4n \+ 1, such as 117 or 121"),
        ({"frames": 0}, r"frames=0: expected 4n \+ 1, such as 1 or 5"),
        ({"height": 720}, "height=720 and width=None: give both"),
        ({"height": 720, "width": 1281}, "width=1281: expected a multiple of 16"),
        ({"aspect": "wide"}, "aspect='wide': expected width:height"),
        ({"steps": 0}, "steps=0: expected at least 1"),
        ({"guidance": 0.5}, r"guidance=0.5: expected 1 \(none\) or more"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        Options(**{"prompts": ("a",), **given})


@pytest.mark.parametrize(
    ("resolution", "aspect", "size"),
    [
        ("720p", "16:9", (720, 1280)),
        ("480p", "16:9", (480, 848)),
        ("720p", "9:16", (1264, 720)),  # upright the nearest bucket is another
        ("480p", "1:1", (640, 640)),
    ],
)
def test_the_nearest_bucket_is_taken(resolution: str, aspect: str, size: tuple[int, int]):
    assert size_of(Options(("a",), resolution=resolution, aspect=aspect)) == size


def test_an_image_has_its_own_shape(picture: Path):
    height, width = size_of(Options(("a",), task="i2v", image=str(picture), resolution="480p"))
    # The image is 170 x 90.
    assert (height % 16, width % 16) == (0, 0)
    assert abs(width / height - 170 / 90) < 0.1


def test_sizes_in_pixels_go_before():
    assert size_of(Options(("a",), height=64, width=96, aspect="1:1")) == (64, 96)
    assert parse_aspect("4:3") == (4, 3)


def test_frames_and_guidance():
    assert Options(("a",)).latent_frames == 31
    assert Options(("a",), frames=1).latent_frames == 1
    assert not Options(("a",), guidance=1).has_guidance


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("word " * 1200, "The prompt 'word word"),
        ('A sign "' + "x" * 300 + '"', "The quoted text of the prompt"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused(
    model_folder: Path, tmp_path: Path, prompt: str, message: str
):
    given = ("-o", str(tmp_path / "a"), "-p", prompt, "--precision", "float32")
    found = CliRunner().invoke(app, ["encode", str(model_folder), *given])
    assert found.exit_code == 2
    assert message in found.output
    assert "the model reads" in found.output
    assert not (tmp_path / "a" / "conditions.safetensors").exists()
