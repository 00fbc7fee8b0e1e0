"""A step is estimated by the rates that were measured on a chip, and the report says so."""

import json
from pathlib import Path

import pytest

import tpuport
from tests.program.small import batch, needs_libtpu, on_meta
from tpuport.cost import CHIPS
from tpuport.cost.calibration import Calibration
from tpuport.foundation.errors import UsageError
from tpuport.foundation.reporting.json_codec import encoded

HALF = Calibration(
    *("TPU v6 lite", "tpu", 8, "2026-11-25"),
    dense_efficiency=0.4,
    hbm_bandwidth=CHIPS["v6e"].hbm_bandwidth / 2,
    ici_link_bandwidth=CHIPS["v6e"].ici_link_bandwidth / 4,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "measurement.json"
    path.write_text(json.dumps({"calibration": encoded(HALF)}))
    return path


@needs_libtpu
def test_the_estimate_has_measured_rates(file: Path):
    chip = CHIPS["v6e"]
    report = tpuport.compile_for(on_meta(), "v6e-8", inputs=batch(), calibration=file)
    assert report.estimate is not None
    assert report.work is not None
    seconds = {part.name: part.seconds for part in report.estimate.parts}
    assert seconds["dense"] == pytest.approx(report.work.chip_flops / (0.4 * chip.bf16_flops))
    assert seconds["hbm"] == pytest.approx(2 * report.work.hbm_bytes / chip.hbm_bandwidth)
    assert seconds["collectives"] > 0
    first, second, *_ = report.estimate.assumptions
    assert first == f"Rates measured on a chip, from {file}: 8 x TPU v6 lite, 2026-11-25."
    assert second.startswith("Without them the estimate is ")
    for shown in (str(report), report.to_html()):
        assert "by rates measured on a chip" in shown
        assert "2026-11-25" in shown
    assert tpuport.CompileReport.from_json(report.to_json()) == report


@needs_libtpu
def test_a_file_of_another_chip_is_refused_before_anything_is_compiled(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tpuport.aot.compile_for.compile_ahead", lambda *_: pytest.fail("compiled"))
    with pytest.raises(UsageError, match=r"measured on\s'TPU v6 lite'.*is for\s'TPU v5 lite'"):
        tpuport.compile_for(on_meta(), "v5e-4", inputs=batch(), calibration=str(file))
    with pytest.raises(UsageError, match="cannot be read"):
        tpuport.compile_for(on_meta(), "v6e-8", inputs=batch(), calibration="nowhere.json")


def test_nothing_is_taken_from_a_file_that_is_not_named():
    """Only `calibration=` calibrates: there is no folder that is looked into."""
    from tpuport.aot.work import calibration_for

    assert calibration_for(None, None) is None
