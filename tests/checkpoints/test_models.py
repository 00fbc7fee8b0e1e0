"""Weights into ported models and back, for the models that people have."""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.torch import load_file, save_file

import tpuport
from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.weights.read import same_bits


class Block(torch.nn.Module):
    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(6.0) * scale, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(ids)) + self.table)


def trained() -> Block:
    model = Block()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.rand_like(tensor) if tensor.is_floating_point() else 3)
    return model.eval()


def on_meta() -> Block:
    with torch.device("meta"):
        model = Block().eval()
    model.table = torch.arange(6.0) * 0.5
    return model


def save(model: torch.nn.Module, path: Path) -> Path:
    weights = model.state_dict()
    if path.suffix == ".safetensors":
        weights.pop("head.weight", None)
        save_file(weights, path)
    else:
        torch.save({"state_dict": weights, "epoch": 1}, path)
    return path


IDS = torch.tensor([[1], [5], [10]]).flatten()
SUFFIXES = pytest.mark.parametrize("suffix", [".safetensors", ".pt"])


@SUFFIXES
def test_a_meta_model_gets_its_weights_from_the_file(tmp_path: Path, suffix: str):
    model = trained()
    path = save(model, tmp_path / f"m{suffix}")
    ported = tpuport.convert(on_meta())
    assert ported.load(path) == ([], [])
    assert ported.params.keys() == {"embed.weight", "norm.weight", "norm.bias"}
    out = ported(IDS)
    assert ported.report.verified
    torch.testing.assert_close(tpuport.to_torch(out), model(IDS), rtol=1e-5, atol=1e-6)
    assert ported.to_torch().norm.num_batches_tracked.dtype is torch.int64


@SUFFIXES
def test_saving_an_untouched_model_gives_the_files_bytes(tmp_path: Path, suffix: str):
    model = trained()
    path = save(model, tmp_path / f"m{suffix}")
    ported = tpuport.convert(on_meta())
    ported.load(path)
    tpuport.save_checkpoint(tmp_path / f"again{suffix}", ported, like=path)
    if suffix == ".safetensors":
        assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    else:
        again = torch.load(tmp_path / "again.pt", weights_only=True)
        assert again["epoch"] == 1
        assert list(again["state_dict"]) == list(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert same_bits(again["state_dict"][name], tensor)


@SUFFIXES
def test_saving_without_like_has_the_modules_dtypes(tmp_path: Path, suffix: str):
    model = trained()
    tpuport.save_checkpoint(tmp_path / f"m{suffix}", tpuport.convert(model))
    path = tmp_path / f"m{suffix}"
    again = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert again["norm.num_batches_tracked"].dtype is torch.int64
    assert "table" not in again
    assert "head.weight" not in again
    model.load_state_dict(again | {"head.weight": again["embed.weight"]})


def test_users_own_load_state_dict_still_works(tmp_path: Path):
    path = save(trained(), tmp_path / "m.pt")
    model = Block().eval()
    model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    torch.testing.assert_close(
        tpuport.to_torch(tpuport.convert(model)(IDS)), model(IDS), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["tensors", "arrays", "numpy", "opened"])
def test_a_mapping_is_loaded(tmp_path: Path, kind: str):
    weights = trained().state_dict()
    given = {
        "tensors": lambda: weights,
        "arrays": lambda: {n: jnp.asarray(t.numpy()) for n, t in weights.items()},
        "numpy": lambda: {n: t.numpy() for n, t in weights.items()},
        "opened": lambda: tpuport.open_checkpoint(save(trained(), tmp_path / "m.pt")),
    }[kind]()
    ported = tpuport.convert(Block().eval())
    ported.load(given)
    if kind != "opened":
        assert np.array_equal(ported.params["embed.weight"], weights["embed.weight"])
    before = np.asarray(ported.params["embed.weight"]).copy()
    weights["embed.weight"].zero_()
    assert np.array_equal(ported.params["embed.weight"], before)


def test_values_get_the_models_dtype(tmp_path: Path):
    path = save(trained(), tmp_path / "m.safetensors")
    ported = tpuport.convert(Block().eval().bfloat16())
    ported.load(path)
    expected = load_file(path)["embed.weight"].bfloat16()
    assert same_bits(tpuport.to_torch(ported.params["embed.weight"]), expected)
    tpuport.save_checkpoint(tmp_path / "again.safetensors", ported, like=path)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.first(x))


@SUFFIXES
@pytest.mark.parametrize("part", ["first", "again", "both"])
def test_a_shared_module_has_two_names_and_one_weight(tmp_path: Path, suffix: str, part: str):
    model = Twice()
    weights = {n: t.clone() for n, t in model.state_dict().items() if part in ("both", n[:5])}
    path = tmp_path / f"m{suffix}"
    save_file(weights, path) if suffix == ".safetensors" else torch.save(weights, path)
    with torch.device("meta"):
        ported = tpuport.convert(Twice())
    assert ported.load(path) == ([], [])
    x = torch.randn(2, 3)
    torch.testing.assert_close(tpuport.to_torch(ported(x)), model(x), rtol=1e-5, atol=1e-6)
    tpuport.save_checkpoint(tmp_path / f"again{suffix}", ported, like=path)
    again = tpuport.open_checkpoint(tmp_path / f"again{suffix}")
    assert list(again) == list(tpuport.open_checkpoint(path))
    assert all(same_bits(again.read(name), tensor) for name, tensor in weights.items())


class Listed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.held = [self.inner.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x @ self.held[0]


def test_a_weight_that_an_attribute_holds_too_is_loaded(tmp_path: Path):
    model = Listed()
    path = save(model, tmp_path / "m.pt")
    ported = tpuport.convert(Listed())
    assert ported.load(path) == ([], [])
    x = torch.randn(3, 2)
    torch.testing.assert_close(tpuport.to_torch(ported(x)), model(x), rtol=1e-5, atol=1e-6)


# What does not fit.


def wrong(tmp_path: Path, change) -> Path:
    weights = dict(trained().state_dict())
    change(weights)
    torch.save(weights, tmp_path / "m.pt")
    return tmp_path / "m.pt"


def test_all_that_does_not_fit_is_said_at_once(tmp_path: Path):
    def change(weights: dict) -> None:
        del weights["norm.weight"]
        weights["other"] = torch.ones(1)
        weights["norm.bias"] = torch.ones(7)
        weights["norm.num_batches_tracked"] = torch.tensor(1.5)

    ported = tpuport.convert(Block())
    before = dict(ported.params)
    with pytest.raises(CheckpointError) as info:
        ported.load(wrong(tmp_path, change))
    for line in (
        "does not fit Block",
        "missing in the checkpoint: norm.weight",
        "not in the model: other",
        "'norm.bias' has shape (7,) in the checkpoint and (6,) in the model",
        "'norm.num_batches_tracked' is torch.float32 in the checkpoint and torch.int64",
    ):
        assert line in str(info.value)
    assert ported.params == before


def test_not_strict_loads_what_fits_and_says_the_rest(tmp_path: Path):
    path = wrong(tmp_path, lambda w: (w.pop("norm.weight"), w.update(other=torch.ones(1))))
    ported = tpuport.convert(Block())
    assert ported.load(path, strict=False) == (["norm.weight"], ["other"])
    assert ported.params["norm.weight"].tolist() == [1.0] * 6


def test_a_prefix_is_proposed_and_taken_off(tmp_path: Path):
    weights = {f"model.{n}": t for n, t in trained().state_dict().items()}
    torch.save({"state_dict": {**weights, "ema.x": torch.ones(1)}}, tmp_path / "m.ckpt")
    ported = tpuport.convert(on_meta())
    with pytest.raises(CheckpointError, match=r"What to do: pass prefix='model\.'"):
        ported.load(tmp_path / "m.ckpt")
    ported.load(tmp_path / "m.ckpt", prefix="model.")
    assert np.array_equal(ported.params["embed.weight"], weights["model.embed.weight"])


def test_buffers_that_no_file_has_are_named_with_what_to_do(tmp_path: Path):
    path = save(trained(), tmp_path / "m.pt")
    with torch.device("meta"):
        ported = tpuport.convert(Block().eval())
    with pytest.raises(CheckpointError, match=r"(?s)table: no checkpoint has .*model\.table = "):
        ported.load(path)
    ported.buffers["table"] = jnp.arange(6.0) * 0.5
    ported.load(path)
    expected = trained_like(path)(IDS)
    torch.testing.assert_close(tpuport.to_torch(ported(IDS)), expected, rtol=1e-5, atol=1e-6)


def trained_like(path: Path) -> Block:
    model = Block().eval()
    model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    return model


def test_two_values_for_a_tied_weight_are_refused(tmp_path: Path):
    path = wrong(tmp_path, lambda w: w.update({"head.weight": torch.zeros(11, 6)}))
    with pytest.raises(CheckpointError, match=r"'embed.weight' and 'head.weight' are one weight"):
        tpuport.convert(Block()).load(path)


class Renaming(Block):
    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest) -> None:
        super()._load_from_state_dict({k.lower(): v for k, v in state_dict.items()}, prefix, *rest)


def test_a_module_that_loads_in_its_own_way_is_left_to_torch(tmp_path: Path):
    path = save(trained(), tmp_path / "m.pt")
    hooked = Block()
    hooked.norm.register_load_state_dict_pre_hook(lambda *_: None)
    for model, what in ((Renaming(), "_load_from_state_dict of its own"), (hooked, "has hooks")):
        with pytest.raises(UsageError, match=f"{what}.*model.load_state_dict"):
            tpuport.convert(model).load(path)


def test_a_model_without_values_cannot_be_saved(tmp_path: Path):
    with pytest.raises(UsageError, match=r"'embed.weight' has a shape but no value; load a check"):
        tpuport.save_checkpoint(tmp_path / "m.pt", tpuport.convert(on_meta()))


# Where arrays go.


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize(
    "spec",
    [("x", None, None), (None, "x", None), (None, None, "x"), ("y", "x", None), (None,) * 3],
    ids=str,
)
def test_a_sharded_array_reads_only_its_slices(tmp_path: Path, monkeypatch, suffix, spec):
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    weights = torch.randn(8, 16, 2048)
    big = {"w": weights, "v": weights[0, :8, :8].t().contiguous().t(), "n": torch.tensor(1)}
    path = tmp_path / f"m{suffix}"
    if suffix == ".pt":
        torch.save(big, path)
    else:
        save_file({**big, "v": big["v"].contiguous()}, path)
    read = []
    from tpuport.weights.read import OpenFile

    real = OpenFile.read_into
    monkeypatch.setattr(
        OpenFile, "read_into", lambda s, b, o: (read.append(len(b)), real(s, b, o))[1]
    )
    opened = tpuport.open_checkpoint(path)
    read.clear()
    part = opened.read("w", (slice(0, 2), slice(None), slice(8, 16)))
    assert same_bits(part, weights[:2, :, 8:16].contiguous())
    assert sum(read) <= weights[:2].nbytes

    def place(name: str, struct: jax.ShapeDtypeStruct):
        rank = len(struct.shape)
        return NamedSharding(mesh, PartitionSpec(*(spec if rank == 3 else spec[:rank])))

    read.clear()
    loaded = tpuport.load_checkpoint(path, place=place, dtype="bfloat16", only="^w$")
    assert sum(read) < weights.nbytes + 200_000
    assert loaded["w"].sharding.is_equivalent_to(place("w", loaded["w"]), 3)
    assert np.array_equal(loaded["w"], np.asarray(jnp.asarray(weights.numpy(), jnp.bfloat16)))
    assert np.array_equal(tpuport.load_checkpoint(path, place=place)["v"], big["v"])


def test_a_ported_model_is_placed_and_saved_from_its_shards(tmp_path: Path):
    mesh = jax.make_mesh((4,), ("x",))
    path = save(trained(), tmp_path / "m.safetensors")
    ported = tpuport.convert(on_meta())
    whole = NamedSharding(mesh, PartitionSpec())
    ported.load(path, place=lambda name, struct: whole)
    assert all(p.sharding == whole for p in ported.params.values())
    tpuport.save_checkpoint(tmp_path / "again.safetensors", ported, like=path)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_device_and_the_default_device_are_honoured(tmp_path: Path):
    save_file({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "m.safetensors")
    devices = jax.devices()
    places = {"a": devices[2], "b": None}
    loaded = tpuport.load_checkpoint(
        tmp_path / "m.safetensors", place=lambda name, struct: places[name]
    )
    assert loaded["a"].devices() == {devices[2]}
    with jax.default_device(devices[1]):
        assert tpuport.load_checkpoint(tmp_path / "m.safetensors")["b"].devices() == {devices[1]}


def test_progress_goes_to_the_end(tmp_path: Path):
    save_file({"a": torch.ones(3), "b": torch.ones(5)}, tmp_path / "m.safetensors")
    seen: list[tuple[int, int]] = []
    tpuport.load_checkpoint(tmp_path / "m.safetensors", progress=lambda *a: seen.append(a))
    assert seen == [(12, 32), (32, 32)]
    with pytest.raises(KeyboardInterrupt), contextlib.ExitStack():
        tpuport.load_checkpoint(tmp_path / "m.safetensors", progress=_interrupt)


def _interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt
