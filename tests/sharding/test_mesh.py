"""Meshes: sizes, devices by name, slices, and what is said when they do not fit."""

import importlib.util

import jax
import pytest

from tpuport.foundation.errors import MissingExtraError, UsageError
from tpuport.sharding import TOPOLOGIES, MeshAxis, make_mesh
from tpuport.sharding.topology import find_topology, is_described

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="waits for libtpu in the test environment"
)


def test_a_mesh_has_every_axis():
    mesh = make_mesh({"data": 1, "fsdp": -1, "tensor": 2})
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 2, "expert": 1, "sequence": 1}
    assert make_mesh({MeshAxis.DATA: 8}, "cpu").devices.size == 8
    assert make_mesh({"fsdp": -1}, jax.devices()[:3]).shape["fsdp"] == 3


def test_slices_are_outermost_on_their_axis():
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, dcn={"data": 2})
    ids = [[d.id for d in row.flat] for row in mesh.devices.transpose(2, 0, 1, 3, 4)]
    assert (mesh.shape["data"], mesh.shape["fsdp"]) == (2, 2)
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]
    both = make_mesh({"data": 4}, dcn={"data": 2})
    assert [d.id for d in both.devices.flat] == list(range(8))


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        ({"data": 3}, {}, "data=3: the sizes multiply to 3, and there are 8 devices"),
        ({"data": -1, "fsdp": -1}, {}, r"only one axis can be -1 .* got data and fsdp"),
        ({"data": -1, "fsdp": 3}, {}, "multiply to 3, which does not divide 8 devices"),
        ({"tp": 2}, {}, "unknown mesh axis 'tp': say 'tensor' for it"),
        ({"rows": 2}, {}, "unknown mesh axis 'rows': the axes are data, fsdp, expert"),
        ({"data": 0}, {}, r"axes\['data'\] is 0: expected a size from 1 up, or -1"),
        ({"data": 4}, {"dcn": {"data": 3}}, "asks for 3 slices of equal size, and there are 8"),
        ({"data": 8}, {"dcn": {"data": 2}}, "there are 4 devices a slice"),
        ({"data": 4}, {"dcn": {"data": -1}}, "sizes of dcn from 1 up"),
        ({"data": 8}, {"devices": "v6e-7"}, "no TPU topology 'v6e-7'.* one such as v6e-1, v6e-4"),
        ({"data": 8}, {"devices": "h100"}, "no TPU topology 'h100'"),
    ],
)
def test_what_does_not_fit_is_said(axes, options, message):
    with pytest.raises(UsageError, match=message):
        make_mesh(axes, **options)


@pytest.mark.parametrize(
    ("name", "libtpu", "chips"),
    [
        ("v5e-8", "v5e:2x4", 8),
        ("v5litepod-16", "v5e:4x4", 16),
        ("v5p-8", "v5p:2x2x1", 4),
        ("v5p-128", "v5p:4x4x4", 64),
        ("V6E-256", "v6e:16x16", 256),
        ("v6e:2x4", "v6e:2x4", 8),
    ],
)
def test_names_of_slices(name: str, libtpu: str, chips: int):
    found = find_topology(name)
    assert (found.libtpu_name, found.num_chips) == (libtpu, chips)


def test_names_count_chips_but_those_of_v5p_cores():
    for name in TOPOLOGIES:
        family, _, number = name.partition("-")
        assert find_topology(name).num_chips == int(number) // (2 if family == "v5p" else 1)


def test_without_libtpu_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs libtpu.* pip install \"tpuport\[tpu\]\""):
        make_mesh({"fsdp": 8}, "v6e-8")


@needs_libtpu
def test_a_described_slice_has_its_chips():
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, "v6e-8")
    assert mesh.devices.size == 8
    assert is_described(mesh.devices.flat[0])
    two = make_mesh({"fsdp": 4}, "v5p-8", dcn={"data": 2})
    assert (two.shape["data"], two.shape["fsdp"]) == (2, 4)
