"""The tuner of attention's block sizes: its arithmetic, its table, and that it can be continued."""

import argparse
import json
import math
import time

import pytest

from benchmarks import attention_blocks as tuner
from benchmarks.attention_blocks_page import write
from tpuport.cost import CHIPS, KernelCompileError, KernelSchedule
from tpuport.cost.bundles import Bundles, Span
from tpuport.kernels.attention.blocks import choose_tiles
from tpuport.kernels.attention.kernel_case import KernelCase
from tpuport.kernels.attention.options import BlockSizes

# A step of 1,000 bundles that multiply, within 100 that always run, and 60 once a row.
STEP = Span(0, 1160, 9, True, (Span(10, 70, 0, False), Span(80, 1080, 9, False)))
BUNDLES = Bundles(Span(0, 1160, 9, False, (STEP,)), (1, 16, 24))
ENTRIES = json.loads(tuner.TABLE.read_text(encoding="utf-8"))


def fake(call, chip: str) -> KernelSchedule:
    return KernelSchedule(call.name, CHIPS[chip], call.grid, BUNDLES, parallel=call.parallel)


def case(mask: str) -> KernelCase:
    size = tuner.SEQUENCE
    return KernelCase("v6e", 1, size, size, 128, "bfloat16", mask, BlockSizes(2048, 2048, 1024))


@pytest.fixture
def schedules(monkeypatch) -> tuner.Schedules:
    monkeypatch.setattr(tuner, "schedule_call", fake)
    return tuner.Schedules()


def cycles(rows: int, steps: int, active: int) -> float:
    return steps * 100 + active * 1000 + rows * 60


def test_seconds_without_a_mask(schedules):
    # 24 * 24 blocks of 2048 * 2048: their products take longer than these bundles do.
    found = tuner.measure_forward(case("full"), schedules)
    least = 4 * tuner.SEQUENCE**2 * 128 / (0.5 * CHIPS["v6e"].bf16_flops)
    assert cycles(24, 24 * 24, 24 * 24) / CHIPS["v6e"].clock_hz < least
    assert found == pytest.approx(least)


def test_seconds_of_two_schedules_and_of_merging(schedules, monkeypatch):
    # A clock slow enough that bundles decide.
    slow = {**vars(CHIPS["v6e"]), "flops_per_cycle": 2**40}
    chip = type(CHIPS["v6e"])(**slow)
    clock = chip.clock_hz
    monkeypatch.setattr(
        tuner,
        "schedule_call",
        lambda call, _: KernelSchedule(call.name, chip, call.grid, BUNDLES),
    )
    merge = 3 * tuner.SEQUENCE * (128 * 2 + 4) / CHIPS["v6e"].hbm_bandwidth
    whole = sum(range(24))
    expected = (cycles(24, 24 * 23, whole) + cycles(24, 24, 24)) / clock + merge
    assert tuner.measure_forward(case("causal"), schedules) == pytest.approx(expected)


def test_whole_blocks_are_compiled_once(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        tuner, "schedule_call", lambda call, chip: compiled.append(call.name) or fake(call, chip)
    )
    schedules = tuner.Schedules()
    for mask in ("full", "causal", "full"):
        tuner.measure_forward(case(mask), schedules)
    # Without a mask, and the blocks at its edge.
    assert len(compiled) == 2


def options(**changes) -> argparse.Namespace:
    given = {"chips": ["v6e"], "head_dims": [128], "dtypes": ["bfloat16"], "masks": ["full"]}
    given["blocks"] = None
    return argparse.Namespace(**{**given, **changes})


def test_a_table_is_continued(tmp_path, schedules, monkeypatch, capsys):
    path = tmp_path / "table.json"
    table = tuner.Table.load(path)
    tuner.tune_forward(table, options(), time.monotonic() + 60)
    first = json.loads(path.read_text())
    assert len(first) == len(tuner.FORWARD)
    assert {entry["mask"] for entry in first} == {"full"}
    asked = []
    monkeypatch.setattr(tuner, "schedule_call", lambda *args: asked.append(args) or fake(*args))
    again = tuner.Table.load(path)
    tuner.tune_forward(again, options(), time.monotonic() + 60)
    assert not asked
    tuner.tune_forward(again, options(head_dims=[64]), time.monotonic() - 1)
    assert json.loads(path.read_text()) == first
    assert "'full'" in capsys.readouterr().out


def test_what_does_not_fit_is_left_out(tmp_path, monkeypatch, capsys):
    def refuse(call, chip):
        raise KernelCompileError("too large")

    monkeypatch.setattr(tuner, "schedule_call", refuse)
    table = tuner.Table.load(tmp_path / "table.json")
    tuner.tune_forward(table, options(), time.monotonic() + 60)
    assert not table.entries
    assert len(table.refused) == len(tuner.FORWARD)
    assert "too large" in capsys.readouterr().out


def test_the_best_backward_sizes_go_into_each_entry(tmp_path, schedules, monkeypatch, capsys):
    monkeypatch.setattr(tuner, "BACKWARD", ((1024, 1024), (512, 512)))
    table = tuner.Table.load(tmp_path / "table.json")
    tuner.tune_forward(table, options(), time.monotonic() + 60)
    tuner.tune_backward(table, options(), time.monotonic() + 60)
    found = json.loads((tmp_path / "table.json").read_text())
    assert {(e["block_q_backward"], e["block_kv_backward"]) for e in found} == {(1024, 1024)}
    assert all(0 < e["share_of_ceiling_backward"] <= 1 for e in found)


def test_the_page_names_every_kernel(tmp_path):
    write(ENTRIES, tmp_path)
    page = (tmp_path / "attention_blocks.md").read_text()
    for entry in ENTRIES:
        assert (
            f"| {entry['chip']} | {entry['head_dim']} | {entry['dtype']} | {entry['mask']} |"
            in page
        )
    assert (tmp_path / "attention_blocks.svg").read_text().startswith("<?xml")
    # The page in the repository is what the table gives.
    assert (tuner.DOCS / "attention_blocks.md").read_text() == page


def test_entries_are_whole_and_possible():
    assert ENTRIES
    for entry in ENTRIES:
        ceiling = CHIPS[entry["chip"]].attention_fill(entry["head_dim"])
        assert 0 < entry["share_of_peak"] <= ceiling + 1e-3, entry
        assert math.isclose(
            entry["share_of_peak"], entry["share_of_ceiling"] * ceiling, abs_tol=1e-3
        )
        assert entry["block_kv"] % entry["block_kv_compute"] == 0


def best(mask: str, kernel: tuple[str, int, str] = ("v6e", 128, "bfloat16")) -> dict:
    kinds = [
        e for e in ENTRIES if (e["chip"], e["head_dim"], e["dtype"]) == kernel and e["mask"] == mask
    ]
    return max(kinds, key=lambda entry: entry["share_of_peak"])


def test_on_v6e_a_head_of_128_reaches_what_the_kernel_can():
    assert best("full")["share_of_peak"] >= 0.38
    assert best("segments")["share_of_peak"] >= 0.36


KERNELS = sorted({(e["chip"], e["head_dim"], e["dtype"]) for e in ENTRIES})


@pytest.mark.parametrize("mask", ["padding", "segments"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_exact_masks_cost_at_most_five_percent(kernel: tuple[str, int, str], mask: str):
    assert best(mask, kernel)["seconds"] <= 1.05 * best("full", kernel)["seconds"]


def test_the_table_is_what_attention_uses():
    entry = max(
        (e for e in ENTRIES if e["chip"] == "v6e" and e["head_dim"] == 128 and e["mask"] == "full"),
        key=lambda e: e["share_of_ceiling"],
    )
    size = tuner.SEQUENCE
    tiles = choose_tiles(
        chip="v6e", head_dim=128, dtype="bfloat16", mask="full", num_queries=size, num_keys=size
    )
    assert (tiles.q, tiles.kv) == (entry["block_q"], entry["block_kv"])
