"""Every format and dtype in and out, to the byte."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tpuport
from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.foundation.interop import backend
from tpuport.weights.read import same_bits


def tensors_of_every_dtype() -> dict[str, torch.Tensor]:
    values = torch.randn(3, 5)
    return {
        "float32": values,
        "float64": values.double() / 3,
        "float16": values.half(),
        "bfloat16": values.bfloat16(),
        "e4m3": values.to(torch.float8_e4m3fn),
        "e5m2": values.to(torch.float8_e5m2),
        "int64": torch.tensor([-(2**31), 0, 2**31 - 1]),
        "int32": torch.arange(4, dtype=torch.int32),
        "int16": torch.arange(4, dtype=torch.int16),
        "int8": torch.arange(-3, 4, dtype=torch.int8),
        "uint8": torch.arange(7, dtype=torch.uint8),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "bool": torch.tensor([True, False, True]),
        "complex64": torch.randn(3, dtype=torch.complex64),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    }


def write(path: Path, tensors: dict) -> Path:
    if path.suffix == ".safetensors":
        save_file(tensors, path, metadata={"format": "pt", "author": "ä"})
    else:
        if path.suffix == ".ckpt":
            for name in ("uint16", "e4m3", "e5m2"):
                # torch 2.13 does not read these back from its old format.
                tensors.get("state_dict", tensors).pop(name, None)
        torch.save(tensors, path, _use_new_zipfile_serialization=path.suffix != ".ckpt")
    return path


def read_back(path: Path) -> dict:
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=True)


FORMATS = pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin", ".ckpt"])


@FORMATS
def test_every_dtype_is_loaded_as_convert_would_hold_it(tmp_path: Path, suffix: str):
    tensors = tensors_of_every_dtype()
    path = write(tmp_path / f"m{suffix}", tensors)
    loaded = tpuport.load_checkpoint(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = backend.to_jax(tensor)
        assert (loaded[name].dtype, loaded[name].shape) == (expected.dtype, expected.shape)
        assert np.asarray(loaded[name]).tobytes() == np.asarray(expected).tobytes()


@FORMATS
def test_reading_gives_the_files_own_dtype(tmp_path: Path, suffix: str):
    tensors = tensors_of_every_dtype()
    opened = tpuport.open_checkpoint(write(tmp_path / f"m{suffix}", tensors))
    assert {n: (i.shape, i.dtype) for n, i in opened.items()} == {
        n: (tuple(t.shape), t.dtype) for n, t in tensors.items()
    }
    assert opened.nbytes == sum(t.nbytes for t in tensors.values())
    for name, tensor in tensors.items():
        assert same_bits(opened.read(name), tensor)


def test_a_round_trip_through_safetensors_gives_the_same_file(tmp_path: Path):
    path = write(tmp_path / "a.safetensors", tensors_of_every_dtype())
    tpuport.save_checkpoint(tmp_path / "b.safetensors", tpuport.load_checkpoint(path), like=path)
    assert (tmp_path / "b.safetensors").read_bytes() == path.read_bytes()


def test_a_header_of_any_order_and_spacing_is_kept(tmp_path: Path):
    entries = {
        "b": {"shape": [2], "data_offsets": [4, 12], "dtype": "F32"},
        "__metadata__": {"z": "1", "a": "2"},
        "a": {"dtype": "I32", "shape": [], "data_offsets": [0, 4]},
    }
    text = json.dumps(entries, indent=1).encode() + b"     "
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(12)))
    loaded = tpuport.load_checkpoint(path)
    assert list(loaded) == ["a", "b"]
    tpuport.save_checkpoint(tmp_path / "b.safetensors", loaded, like=path)
    assert (tmp_path / "b.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".ckpt"])
def test_a_round_trip_through_torch_gives_the_same_tensors(tmp_path: Path, suffix: str):
    tensors = tensors_of_every_dtype()
    base = torch.randn(4, 6)
    tied = {"w": base, "tied": base, "turned": base.t(), "part": base[1:3, 2:4]}
    whole = {
        "epoch": 3,
        "state_dict": {**tensors, **tied, "p": torch.nn.Parameter(base[0].clone())},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "lr": 0.1},
    }
    path = write(tmp_path / f"a{suffix}", whole)
    tpuport.save_checkpoint(tmp_path / f"b{suffix}", tpuport.load_checkpoint(path), like=path)
    again = read_back(tmp_path / f"b{suffix}")
    assert list(again) == list(whole)
    assert (again["epoch"], again["optimizer"]["lr"]) == (3, 0.1)
    assert torch.equal(again["optimizer"]["state"][0]["exp_avg"], torch.ones(2))
    assert list(again["state_dict"]) == list(whole["state_dict"])
    for name, tensor in whole["state_dict"].items():
        assert same_bits(again["state_dict"][name], tensor)
        assert again["state_dict"][name].stride() == tensor.stride()
    assert isinstance(again["state_dict"]["p"], torch.nn.Parameter)
    shared = {again["state_dict"][n].untyped_storage().data_ptr() for n in tied}
    assert len(shared) == 1


def test_tied_weights_are_one_array_and_stay_tied(tmp_path: Path):
    base = torch.randn(4)
    path = write(tmp_path / "a.pt", {"a": base, "b": base, "c": base.clone()})
    loaded = tpuport.load_checkpoint(path)
    assert loaded["a"] is loaded["b"]
    assert loaded["a"] is not loaded["c"]
    changed = loaded["a"] + 1
    tpuport.save_checkpoint(tmp_path / "b.pt", {**loaded, "a": changed, "b": changed}, like=path)
    again = read_back(tmp_path / "b.pt")
    assert torch.equal(again["a"], base + 1)
    assert again["a"].untyped_storage().data_ptr() == again["b"].untyped_storage().data_ptr()
    assert torch.equal(again["c"], base)


@FORMATS
def test_only_touched_weights_are_rounded(tmp_path: Path, suffix: str):
    tensors = {"kept": torch.randn(9), "touched": torch.randn(9), "wide": torch.randn(3).double()}
    path = write(tmp_path / f"a{suffix}", tensors)
    held = tpuport.load_checkpoint(path, dtype="bfloat16")
    assert {a.dtype for a in held.values()} == {jnp.bfloat16.dtype}
    held["touched"] = held["touched"] * 2
    tpuport.save_checkpoint(tmp_path / f"b{suffix}", held, like=path)
    again = read_back(tmp_path / f"b{suffix}")
    assert same_bits(again["kept"], tensors["kept"])
    assert same_bits(again["wide"], tensors["wide"])
    assert same_bits(again["touched"], (tensors["touched"].bfloat16() * 2).float())


def test_without_like_the_file_has_the_arrays_dtypes(tmp_path: Path):
    arrays = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.arange(4, dtype=jnp.int8)}
    for name in ("m.safetensors", "m.pt"):
        tpuport.save_checkpoint(tmp_path / name, arrays)
        again = read_back(tmp_path / name)
        assert again["a"].dtype is torch.bfloat16
        assert torch.equal(again["b"], torch.arange(4, dtype=torch.int8))


def test_safetensors_and_torch_are_written_from_each_other(tmp_path: Path):
    tensors = tensors_of_every_dtype()
    path = write(tmp_path / "a.safetensors", tensors)
    loaded = tpuport.load_checkpoint(path)
    tpuport.save_checkpoint(tmp_path / "b.pt", loaded, like=path)
    tpuport.save_checkpoint(
        tmp_path / "c.safetensors",
        tpuport.load_checkpoint(tmp_path / "b.pt"),
        like=tmp_path / "b.pt",
    )
    for name in ("b.pt", "c.safetensors"):
        for key, value in read_back(tmp_path / name).items():
            assert same_bits(value, tensors[key])


# Dtypes.


def test_a_policy_casts_floating_tensors_by_the_first_pattern(tmp_path: Path):
    tensors = {
        "layer.weight": torch.randn(5),
        "norm.weight": torch.randn(5),
        "layer.scale": torch.randn(2).half(),
        "steps": torch.tensor(7),
    }
    path = write(tmp_path / "a.safetensors", tensors)
    policy = {"norm": "float32", r"scale$": None, "": torch.bfloat16}
    loaded = tpuport.load_checkpoint(path, dtype=policy)
    assert {n: str(a.dtype) for n, a in loaded.items()} == {
        "layer.weight": "bfloat16",
        "norm.weight": "float32",
        "layer.scale": "float16",
        "steps": "int32",
    }
    expected = backend.to_jax(tensors["layer.weight"].bfloat16())
    assert np.array_equal(loaded["layer.weight"], expected)
    assert tpuport.load_checkpoint(path, dtype=jnp.float16)["norm.weight"].dtype == jnp.float16


@pytest.mark.parametrize(
    ("tensor", "dtype", "match"),
    [
        (torch.tensor([1.0, 1e6]), "float16", r"'w\.x' has the value 1e\+06, .* in torch.float16"),
        (
            torch.tensor([1e300], dtype=torch.float64),
            None,
            r"1e\+300, which does not fit in torch.float32",
        ),
        (torch.tensor([2**31]), None, "'w.x': an torch.int64 value .* does not fit in int32"),
        (torch.tensor([1e4]), "float8_e4m3fn", "does not fit in torch.float8_e4m3fn"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(tmp_path: Path, tensor, dtype, match: str):
    path = write(tmp_path / "a.safetensors", {"w.x": tensor})
    with pytest.raises(CheckpointError, match=match):
        tpuport.load_checkpoint(path, dtype=dtype)


def test_infinity_and_nan_are_cast(tmp_path: Path):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    path = write(tmp_path / "a.safetensors", {"w": special})
    loaded = tpuport.load_checkpoint(path, dtype="float16")["w"]
    assert np.array_equal(loaded, special.half().numpy(), equal_nan=True)


def test_64_bit_values_are_kept_where_jax_is_told_to(tmp_path: Path):
    tensors = {"i": torch.tensor([2**40]), "f": torch.tensor([1 / 3]).double()}
    path = write(tmp_path / "a.safetensors", tensors)
    with jax.enable_x64(True):
        loaded = tpuport.load_checkpoint(path)
    assert {n: str(a.dtype) for n, a in loaded.items()} == {"i": "int64", "f": "float64"}
    assert loaded["i"].item() == 2**40


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dtype": "bf17"}, "expected a dtype .* got 'bf17'"),
        ({"dtype": "int8"}, "casts floating tensors, so it cannot name torch.int8"),
        ({"dtype": {"(": "float32"}}, r"'\(' is not a regular expression"),
        ({"only": "nope"}, "only='nope' is found in no name of .*; it has 'a', 'b'"),
        ({"prefix": "model."}, r"no name of .* starts with prefix='model\.'"),
        ({"rename": lambda name: "x"}, "rename gives 'x' for both 'a' and 'b'"),
        ({"place": lambda name, struct: "tpu"}, r"place\('a', ...\) gave a str"),
    ],
)
def test_an_argument_that_fits_nothing_is_refused(tmp_path: Path, arguments: dict, match: str):
    path = write(tmp_path / "a.safetensors", {"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(UsageError, match=match):
        tpuport.load_checkpoint(path, **arguments)


@FORMATS
def test_the_callers_modes_do_not_reach_the_values(tmp_path: Path, suffix: str):
    path = write(tmp_path / f"a{suffix}", {"a": torch.ones(3)})
    with torch.device("meta"), torch.inference_mode():
        loaded = tpuport.load_checkpoint(path)
        tpuport.save_checkpoint(tmp_path / f"b{suffix}", loaded, like=path)
        assert tpuport.open_checkpoint(path).read("a").tolist() == [1, 1, 1]
    assert read_back(tmp_path / f"b{suffix}")["a"].tolist() == [1, 1, 1]
