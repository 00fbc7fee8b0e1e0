"""Weights of published folders, and modules that are shapes until those are read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.hunyuan_video.components import Components, parameters_on_meta, renaming
from recipes.hunyuan_video.upstream import open_components
from tpuport.foundation.errors import UsageError


@pytest.mark.parametrize(
    ("in_file", "found"),
    [
        ("head.weight", "head.weight"),
        ("vision_model.head.weight", "head.weight"),
        ("model.head.weight", "head.weight"),
    ],
)
def test_what_stands_before_names_is_taken_off(in_file: str, found: str):
    rename = renaming([in_file], {"head.weight"})
    assert (rename(in_file) if rename else in_file) == found


def test_what_stands_before_names_is_put_there():
    rename = renaming(["head.weight"], {"vision_model.head.weight"})
    assert rename is not None
    assert rename("head.weight") == "vision_model.head.weight"
    assert renaming(["tail.weight"], {"head.weight"}) is None


def test_parameters_are_shapes_and_buffers_values():
    register: Any = torch.nn.Module.register_parameter
    with parameters_on_meta():
        norm = torch.nn.BatchNorm1d(3)
        tied = torch.nn.Linear(2, 2)
        tied.weight, weight = tied.weight, tied.weight
    assert norm.weight.is_meta
    assert norm.running_var is not None
    assert torch.equal(norm.running_var, torch.ones(3))
    # One that is set again stays the same object: ties hold.
    assert tied.weight is weight
    assert torch.nn.Module.register_parameter is register
    with pytest.raises(RuntimeError, match="of the user's"), parameters_on_meta():
        raise RuntimeError("of the user's")
    assert torch.nn.Module.register_parameter is register


def test_weights_have_the_dtype_of_the_precision(model_folder: Path):
    for precision, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        module = Components(model_folder, precision).module("text_encoder")
        assert {weight.dtype for weight in module.parameters()} == {dtype}
        # Its frequencies are float32 whatever the weights are.
        frequencies = [b for name, b in module.named_buffers() if name.endswith("inv_freq")]
        assert frequencies
        assert all(b.dtype == torch.float32 and not b.is_meta for b in frequencies)


def test_a_model_in_hugging_faces_cache_goes_by_its_name(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "models--someone--tiny-video"
    (kept / "snapshots").mkdir(parents=True)
    (kept / "snapshots" / ("a" * 40)).symlink_to(model_folder)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("a" * 40)
    found = open_components("someone/tiny-video", "float32")
    assert found.config("transformer") == Components(model_folder).config("transformer")
    with pytest.raises(UsageError, match="someone/other is no folder, and Hugging Face's cache"):
        open_components("someone/other", "float32")
