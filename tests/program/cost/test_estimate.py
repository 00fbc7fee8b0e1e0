"""The estimate, against the one program whose time on a TPU was measured in two ways."""

import math

import pytest

from tpuport.cost import CHIPS, Collective, chip_of, collective_seconds, estimate_step
from tpuport.foundation.errors import UsageError

GIB = 2**30


def moved(kind: str, gib: float, size: int = 8) -> Collective:
    return Collective(kind, "", round(gib * GIB), size)


# HunyuanVideo-1.5 (8.33 B parameters, 121 frames at 720p, batch 2) on v6e-8, as a port by hand
# spread it. Figures of one chip and step: products and HBM as XLA compiled them, collectives from
# its text, attention from the schedules of its kernels; measured: what the port's authors report.
HAND_PORT = {
    "JAX's splash attention": (
        {
            "dense_flops": 244.4e12,
            "hbm_bytes": 2.29e12,
            "collectives": [moved("all-reduce", 93.0), moved("all-gather", 46.5)],
            "kernel_seconds": 4.06,
        },
        7.29,
    ),
    "a kernel of its own": (
        {
            "dense_flops": 153.8e12,
            "hbm_bytes": 1.51e12,
            "collectives": [moved("all-gather", 93.0), moved("all-to-all", 29.1)],
            "kernel_seconds": 4.10,
        },
        5.81,
    ),
}


@pytest.mark.parametrize("which", HAND_PORT)
def test_within_ten_percent_of_what_was_measured(which):
    figures, measured = HAND_PORT[which]
    found = estimate_step(chip_of("v6e-8"), **figures)
    assert found.seconds == pytest.approx(measured, rel=0.10)


def test_the_two_are_told_apart():
    """The order is right, and by about as much as was measured."""
    first, second = (
        estimate_step(chip_of("v6e"), **figures).seconds for figures, _ in HAND_PORT.values()
    )
    assert first / second == pytest.approx(7.29 / 5.81, rel=0.10)


def test_parts_and_what_they_take_for_granted():
    found = estimate_step(
        CHIPS["v6e"],
        dense_flops=918e12,
        hbm_bytes=1.638e12,
        collectives=[moved("all-gather", 1)],
        kernel_seconds=0.25,
        dense_efficiency=0.5,
    )
    seconds = {part.name: part.seconds for part in found.parts}
    assert seconds["dense"] == pytest.approx(2.0)
    assert seconds["hbm"] == pytest.approx(1.0)
    assert seconds["kernels"] == 0.25
    assert found.seconds == pytest.approx(sum(seconds.values()))
    assert found.parts[0].how == "918 TFLOP at 50.0% of 918 TFLOP/s"
    assert any("nothing overlaps" in line for line in found.assumptions)


@pytest.mark.parametrize("efficiency", [0, -1, 1.01])
def test_an_efficiency_is_a_share(efficiency):
    with pytest.raises(UsageError, match="dense_efficiency is a share of the peak"):
        estimate_step(
            CHIPS["v6e"], dense_flops=1, hbm_bytes=1, collectives=(), kernel_seconds=0,
            dense_efficiency=efficiency,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "size", "links_of_traffic"),
    [
        ("all-gather", 8, 7 / 8 / 2),
        ("reduce-scatter", 8, 7 / 8 / 2),
        ("all-reduce", 8, 2 * 7 / 8 / 2),
        ("collective-permute", 8, 1),
        # Four chips send half of what they have over two links.
        ("all-to-all", 8, 4 * 0.5 / 2),
        ("all-to-all", 16, 8 * 0.5 / 4),
        # Two chips have one link.
        ("all-gather", 2, 1 / 2),
        ("all-to-all", 2, 1 / 2),
        ("all-gather", 1, 0),
    ],
)
def test_seconds_of_collectives(kind, size, links_of_traffic):
    link = CHIPS["v6e"].ici_link_bandwidth
    found = collective_seconds(CHIPS["v6e"], moved(kind, 1, size))
    assert found == pytest.approx(links_of_traffic * GIB / link)


def test_runs_of_a_collective_add_up():
    once = Collective("all-gather", "", 1000, 8)
    often = Collective("all-gather", "", 1000, 8, times=54)
    chip = CHIPS["v5p"]
    assert collective_seconds(chip, often) == pytest.approx(54 * collective_seconds(chip, once))


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("v6e", "v6e"), ("v6e-8", "v6e"), ("v6e:2x4", "v6e"), ("v5litepod-4", "v5e"),
        ("V5P-16", "v5p"),
        ("TPU v6 lite", "v6e"), ("TPU v5", "v5p"), ("TPU v5 lite", "v5e"), ("TPU v5p", "v5p"),
    ],
)  # fmt: skip
def test_chips_by_name(name, chip):
    assert chip_of(name).name == chip


def test_an_unknown_chip():
    with pytest.raises(UsageError, match=r"'h100'. What to do: name one of v4, v5e, v5p, v6e"):
        chip_of("h100")


@pytest.mark.parametrize(
    ("chip", "clock"), [("v4", 1.05e9), ("v5e", 1.5e9), ("v5p", 1.75e9), ("v6e", 1.75e9)]
)
def test_the_clock_follows_from_the_peak(chip, clock):
    assert CHIPS[chip].clock_hz == pytest.approx(clock, rel=0.01)


@pytest.mark.parametrize(
    ("chip", "head_dim", "share"),
    [
        ("v6e", 128, 0.5), ("v6e", 64, 0.25), ("v6e", 256, 1), ("v6e", 192, 0.75),
        ("v5p", 128, 1), ("v5e", 64, 0.5),
    ],
)  # fmt: skip
def test_what_a_head_fills(chip, head_dim, share):
    assert CHIPS[chip].attention_fill(head_dim) == pytest.approx(share)


def test_what_other_products_fill():
    chip = CHIPS["v6e"]
    assert chip.fill(2048, 8192) == 1
    assert chip.fill(128, 8192) == 0.5
    assert chip.fill(300, 256) == 300 / 512
    assert math.isclose(chip.attention_fill(128, 256), (128 + 256) / (128 / 0.5 + 256))


def test_the_peak_by_dtype():
    chip = CHIPS["v6e"]
    assert chip.peak("int8", "int8") == 2 * chip.peak("bfloat16", "bfloat16")
    assert chip.peak("int8", "bfloat16") == chip.peak("float32", "float32") == chip.bf16_flops
    assert CHIPS["v4"].peak("int8", "int8") == CHIPS["v4"].bf16_flops


def test_facts_agree_with_jax():
    """JAX's own table, of one core; a newer chip's name or a changed figure shows here."""
    from jax._src.pallas.mosaic import tpu_info

    for name, version in (
        ("v4", "TPU_V4"),
        ("v5e", "TPU_V5E"),
        ("v5p", "TPU_V5P"),
        ("v6e", "TPU_V6E"),
    ):
        chip = CHIPS[name]
        theirs = tpu_info._get_tpu_info_impl(tpu_info.ChipVersion[version], chip.cores)
        assert theirs.mxu_column_size == chip.mxu_width
        assert theirs.vmem_capacity_bytes == chip.vmem_bytes
        assert theirs.bf16_ops_per_second * chip.cores == pytest.approx(chip.bf16_flops, rel=0.01)
        assert theirs.hbm_capacity_bytes * chip.cores == pytest.approx(chip.hbm_bytes, rel=0.02)
        # Cloud's page has 2765 GB/s of v5p, JAX 2460.
        assert theirs.mem_bw_bytes_per_second * chip.cores == pytest.approx(
            chip.hbm_bandwidth, rel=0.12
        )
