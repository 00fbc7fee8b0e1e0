"""What a model file promises is read from it, checked, and never executed."""

import base64
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from recipes.openpilot.contract import Kind, load_onnx, read_contract, read_slices, write_slices
from recipes.openpilot.generations import GENERATIONS
from recipes.openpilot.make_model import make_model
from recipes.openpilot.small_model import build
from tpuport.foundation.errors import CheckpointError, UsageError

# What the releases have: inputs and output widths (facts from their own metadata).
RELEASES = {
    "0.9.7": [(Kind.SUPERCOMBO, 6504)],
    "0.9.9": [(Kind.VISION, 1536), (Kind.POLICY, 4968)],
    "0.10.0": [(Kind.VISION, 1536), (Kind.POLICY, 4968)],
    "0.10.3": [(Kind.VISION, 1576), (Kind.POLICY, 1000)],
    "2026-07": [(Kind.SUPERCOMBO, 2576)],
    "2026-09": [(Kind.STATEFUL, 2576)],
}
IMAGE = (1, 12, 128, 256)
INPUTS = {
    "0.9.7": {
        "input_imgs": ("float32", IMAGE),
        "big_input_imgs": ("float32", IMAGE),
        "desire": ("float32", (1, 100, 8)),
        "traffic_convention": ("float32", (1, 2)),
        "lateral_control_params": ("float32", (1, 2)),
        "prev_desired_curv": ("float32", (1, 100, 1)),
        "features_buffer": ("float32", (1, 99, 512)),
    },
    "2026-07": {
        "img": ("uint8", IMAGE),
        "big_img": ("uint8", IMAGE),
        "features_buffer": ("float32", (1, 24, 512)),
        "desire_pulse": ("float32", (1, 25, 8)),
        "traffic_convention": ("float32", (1, 2)),
        "action_t": ("float32", (1, 2)),
    },
    "2026-09": {
        "new_img": ("uint8", (2, 6, 128, 256)),
        "desire": ("float32", (8,)),
        "traffic_convention": ("float32", (1, 2)),
        "action_t": ("float32", (1, 2)),
        "state_img_q": ("uint8", (2, 5, 6, 128, 256)),
        "state_desire_q": ("float32", (100, 1, 8)),
        "state_feat_q": ("float32", (96, 1, 512)),
    },
}


# The files of 0.10.0 have the inputs and outputs of those of 0.9.9.
@pytest.mark.parametrize(
    "generation", [pytest.param(g, marks=[pytest.mark.slow] * (g == "0.10.0")) for g in RELEASES]
)
def test_each_generation_is_read(driving_models: Callable[..., list[Path]], generation: str):
    contracts = [read_contract(path) for path in driving_models(generation)]
    assert [(c.kind, c.width) for c in contracts] == RELEASES[generation]
    assert all(c.opset == 20 for c in contracts)
    for contract, kind in zip(contracts, GENERATIONS[generation], strict=True):
        assert contract.slices == kind.slices
        assert contract.metadata["model_checkpoint"].startswith("random-weights/")
        assert "hidden_state" not in contract.slices or contract.feature_len == 512
    if generation in INPUTS:
        found = {spec.name: (spec.dtype, spec.shape) for spec in contracts[0].inputs}
        assert found == INPUTS[generation]


def test_the_halves_of_a_split_model_fit(driving_models: Callable[..., list[Path]]):
    vision, policy = (read_contract(path) for path in driving_models("0.10.3"))
    assert vision.images == ("img", "big_img")
    assert vision.slices["hidden_state"] == slice(1064, 1576)
    assert vision.slices["lead"] == slice(917, 1061)
    assert policy.images == ()
    assert policy.slices["plan"] == slice(0, 990)
    assert [spec.name for spec in policy.inputs] == [
        *("desire_pulse", "traffic_convention", "features_buffer")
    ]


def test_a_stateful_model_gives_what_it_takes(driving_models: Callable[..., list[Path]]):
    contract = read_contract(driving_models("2026-09")[0])
    assert [spec.name for spec in contract.outputs] == [
        *("outputs", "next_state_img_q", "next_state_desire_q", "next_state_feat_q")
    ]


def test_a_half_precision_file_has_the_shipped_dtypes(driving_models: Callable[..., list[Path]]):
    (path,) = driving_models("2026-07", opset=21, fp16=True)
    contract = read_contract(path)
    assert contract.opset == 21
    assert {spec.name: spec.dtype for spec in contract.inputs} == {
        **{"img": "uint8", "big_img": "uint8"},
        **dict.fromkeys(
            ("features_buffer", "desire_pulse", "traffic_convention", "action_t"), "float16"
        ),
    }
    weights = {t.data_type for t in load_onnx(path).graph.initializer if len(t.dims) > 1}
    assert weights == {TensorProto.FLOAT16}


def test_weights_are_those_of_the_seed():
    (kind,) = GENERATIONS["2026-07"]
    state, same, other = (build(kind, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(value, same[name]) for name, value in state.items())
    assert not torch.equal(state["road.stem.weight"], other["road.stem.weight"])


# Bytes of published files in half precision: git LFS pointers of openpilot's releases.
@pytest.mark.parametrize(
    ("generation", "size", "megabytes"),
    [("0.10.3", "real", (46.3, 13.9)), ("2026-07", "large", (96.6,))],
)
def test_real_sizes_are_those_of_published_files(
    generation: str, size: str, megabytes: tuple[float, ...]
):
    with torch.device("meta"):
        models = [build(kind, size=size) for kind in GENERATIONS[generation]]
    for model, expected in zip(models, megabytes, strict=True):
        weights = sum(p.numel() for p in model.parameters())
        assert 2e-6 * weights == pytest.approx(expected, rel=0.1)


def test_wrong_wishes_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"generation='0\.8': expected one of 0\.9\.7"):
        make_model(tmp_path, "0.8")
    with pytest.raises(UsageError, match="opset=14: expected one of 18, 19, 20, 21"):
        make_model(tmp_path, "2026-07", opset=14)
    with pytest.raises(UsageError, match="size='huge': expected one of small, pretrained"):
        make_model(tmp_path, "2026-07", size="huge")


# -- files that are not what they say --------------------------------------------------------------


def graph(
    inputs: dict[str, tuple[int, tuple[Any, ...]]] | None = None,
    outputs: dict[str, tuple[int, tuple[Any, ...]]] | None = None,
    slices: Any = None,
    metadata: dict[str, str] | None = None,
) -> onnx.ModelProto:
    """A graph whose inputs and outputs are declared, and not computed."""
    inputs = inputs or {"features_buffer": (10, (1, 25, 512)), "desire_pulse": (10, (1, 25, 8))}
    outputs = outputs or {"outputs": (10, (1, 1000))}
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Identity", [next(iter(inputs))], [next(iter(outputs))])],
            "g",
            [helper.make_tensor_value_info(n, k, s) for n, (k, s) in inputs.items()],
            [helper.make_tensor_value_info(n, k, s) for n, (k, s) in outputs.items()],
        ),
        opset_imports=[helper.make_opsetid("", 20)],
    )
    slices = {"plan": slice(0, 990)} if slices is None else slices
    values = {"output_slices": write_slices(slices)} if metadata is None else metadata
    helper.set_model_props(model, values)
    return model


def encoded(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_hostile_pickle_is_not_executed(tmp_path: Path):
    target = tmp_path / "made"
    for value in (Hostile(target), {"plan": Hostile(target)}, {"plan": os.system}):
        model = graph(metadata={"output_slices": encoded(value)})
        with pytest.raises(CheckpointError, match=r"it names posix.* only slices are read"):
            read_contract(model)
    with pytest.raises(CheckpointError, match=r"it names builtins\.getattr"):
        read_slices(encoded({"plan": getattr}))
    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("%%%", "output_slices was not read"),
        ("", "output_slices was not read: EOFError"),
        (encoded({"plan": slice(0, 990)})[:-12], "was not read"),
        (encoded([1, 2]), "is list [1, 2]: expected a dict"),
        (encoded({}), "is dict {}: expected a dict"),
        (encoded({"plan": 3}), "output_slices['plan'] is 3: expected a slice"),
        (encoded({"plan": slice(0, 9, 2)}), "expected a slice"),
        (encoded({"plan": slice(9, 3)}), "expected a slice"),
        (encoded({"plan": slice(0, None)}), "expected a slice"),
        (encoded({"plan": slice(-3, 3)}), "expected a slice"),
        (encoded({"plan": slice(0, True)}), "expected a slice"),
        (encoded({5: slice(0, 3)}), "output_slices[5]"),
        ("A" * (2 << 20), "output_slices has 2097152 bytes"),
    ],
)
def test_a_damaged_table_is_refused(text: str, said: str):
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read_slices(text)


def test_a_table_comes_back():
    table = {"plan": slice(0, 990, None), "desire_state": slice(990, 998, None)}
    assert read_slices(write_slices(table)) == table
    # As openpilot's own tools write it, with line breaks.
    assert read_slices(base64.encodebytes(pickle.dumps(table, protocol=2)).decode()) == table


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (graph(metadata={}), "no metadata output_slices, only none at all"),
        (graph(metadata={"model_checkpoint": "a"}), "only ['model_checkpoint']"),
        (
            graph(inputs={"img": (2, (1, 3, 128, 256))}),
            "the input 'img' is (1, 3, 128, 256): expected (1, 12, 128, 256)",
        ),
        (
            graph(inputs={"features_buffer": (1, (1, 30, 512))}),
            "expected (1, 99, any) or (1, 24, any) or (1, 25, any)",
        ),
        (graph(inputs={"nav_features": (1, (1, 256))}), "'nav_features' (1, 256) is of no gener"),
        (graph(inputs={"desire": (1, (1, 25, 8))}), "it takes no images and no features"),
        (
            graph(inputs={"features_buffer": (1, (1, "t", 512))}),
            "dim 1 of 'features_buffer' is open (t)",
        ),
        (
            graph(inputs={"features_buffer": (8, (1, 25, 512))}),
            "'features_buffer' has ONNX's element type 8",
        ),
        (graph(outputs={"outputs": (1, (1, 500))}), "output_slices['plan'] is 0:990, and the out"),
        (graph(outputs={"outputs": (1, (1, 10, 100))}), "(1, 10, 100): expected (1, all heads)"),
        (
            graph(slices={"hidden_state": slice(0, 500)}),
            "hidden_state has 500 numbers, and features_buffer takes 512",
        ),
        (
            graph(inputs={"new_img": (2, (2, 6, 128, 256)), "state_feat_q": (1, (96, 1, 512))}),
            "'state_feat_q' goes in as float32 (96, 1, 512) and comes out as nothing",
        ),
    ],
)
def test_a_wrong_graph_is_refused(model: onnx.ModelProto, said: str):
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read_contract(model)


def test_an_open_batch_is_one():
    model = graph(inputs={"features_buffer": (1, ("batch", 25, 512))})
    assert read_contract(model).inputs[0].shape == (1, 25, 512)


def test_files_that_are_no_models_are_refused(tmp_path: Path):
    pointer, noise, empty = tmp_path / "lfs.onnx", tmp_path / "noise.onnx", tmp_path / "e.onnx"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    noise.write_bytes(np.random.default_rng(0).bytes(1000))
    empty.write_bytes(b"")
    for path, said in (
        (pointer, "git LFS pointer"),
        (noise, "not read as ONNX"),
        (empty, "no nod"),
    ):
        with pytest.raises(CheckpointError, match=said) as error:
            read_contract(path)
        assert str(path) in str(error.value)
        assert "What to do" in str(error.value)
    with pytest.raises(CheckpointError, match="No such file"):
        read_contract(tmp_path / "none.onnx")
