"""Block sizes: valid for every sequence, tuned where they are known, the caller's first."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuport.foundation.errors import UsageError
from tpuport.kernels.attention import BlockSizes, blocks
from tpuport.kernels.attention.blocks import chip_of, choose_tiles
from tpuport.kernels.attention.kernel_case import KINDS
from tpuport.kernels.attention.tiles import KernelTiles


def tiles(**changes: Any) -> KernelTiles:
    case: dict[str, Any] = {
        "chip": "v6e",
        "head_dim": 128,
        "dtype": "bfloat16",
        "mask": "full",
        "num_queries": 112_856,
        "num_keys": 112_856,
    }
    return choose_tiles(**{**case, **changes})


@given(
    num_queries=st.integers(1, 20_000),
    num_keys=st.integers(1, 20_000),
    chip=st.sampled_from(["v4", "v5e", "v5p", "v6e", "v7x", "cpu"]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_sizes_are_valid_and_waste_little(num_queries: int, num_keys: int, chip: str, dtype: str):
    found = tiles(num_queries=num_queries, num_keys=num_keys, chip=chip, dtype=dtype)
    for size in vars(found).values():
        assert size > 0
        assert size % 128 == 0
    assert found.kv % found.kv_compute == 0
    for length, size in ((num_queries, found.q), (num_keys, found.kv)):
        whole = -(-length // size) * size
        # Never a block more than 128s need, and not much of a long sequence.
        assert whole < length + max(128, length / 4 + 128)


def test_a_long_sequence_has_large_blocks():
    found = tiles()
    assert found.q >= 1536
    assert (found.kv, found.kv_compute) == (2048, 1024)


def test_a_callers_sizes_come_first_and_shrink_to_the_sequence():
    wanted = BlockSizes(q=256, kv=512, kv_compute=256)
    found = tiles(override=wanted)
    assert (found.q, found.kv, found.kv_compute) == (256, 512, 256)
    short = tiles(override=wanted, num_queries=100, num_keys=200)
    assert (short.q, short.kv) == (128, 256)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (BlockSizes(100, 128, 128), r"BlockSizes\(q=100\) is not a multiple of 128"),
        (BlockSizes(128, 0, 128), r"BlockSizes\(kv=0\) is not a multiple of 128"),
        (BlockSizes(128, 384, 256), r"kv=384, kv_compute=256\): kv_compute must divide kv"),
    ],
)
def test_sizes_that_the_kernel_cannot_have_are_refused(sizes: BlockSizes, message: str):
    with pytest.raises(UsageError, match=message):
        tiles(override=sizes)


def test_the_best_entry_of_the_table_is_taken(monkeypatch: pytest.MonkeyPatch):
    key = {"chip": "v6e", "head_dim": 128, "dtype": "bfloat16", "mask": "full"}
    entries = (
        {**key, "block_q": 512, "block_kv": 512, "block_kv_compute": 512, "share_of_ceiling": 0.5},
        {**key, "block_q": 768, "block_kv": 768, "block_kv_compute": 256, "share_of_ceiling": 0.7},
        {
            **(key | {"mask": "causal"}),
            **{"block_q": 128, "block_kv": 128, "block_kv_compute": 128, "share_of_ceiling": 0.9},
        },
    )
    monkeypatch.setattr(blocks, "table", lambda: entries)
    found = tiles(num_queries=7680, num_keys=7680)
    assert (found.q, found.kv, found.kv_compute) == (768, 768, 256)
    assert tiles(mask="window", num_queries=8192).q == 2048


def test_a_masked_kernel_has_no_more_queries_than_fit(monkeypatch: pytest.MonkeyPatch):
    sizes = {"block_q": 3072, "block_kv": 2048, "block_kv_compute": 1024, "share_of_ceiling": 0.8}
    key = {"chip": "v6e", "head_dim": 128, "dtype": "bfloat16"}
    entries = tuple({**key, **sizes, "mask": mask} for mask in ("full", "padding"))
    monkeypatch.setattr(blocks, "table", lambda: entries)
    assert tiles(num_queries=30_720).q == 3072
    assert tiles(num_queries=30_720, mask="padding").q <= 2048


def test_the_table_is_as_its_readers_need_it():
    text = Path(blocks.__file__).with_name("block_table.json").read_text(encoding="utf-8")
    assert tuple(json.loads(text)) == blocks.table()
    for entry in blocks.table():
        assert entry["mask"] in KINDS
        assert entry["dtype"] in ("bfloat16", "float32")
        sizes = entry["block_q"], entry["block_kv"], entry["block_kv_compute"]
        blocks.check_sizes(BlockSizes(*sizes))
        assert 0 < entry["share_of_peak"] <= entry["share_of_ceiling"] <= 1


def test_chips_are_known_by_jaxs_names():
    assert [chip_of(kind) for kind in ("TPU v6 lite", "TPU v5", "cpu")] == ["v6e", "v5p", "cpu"]
