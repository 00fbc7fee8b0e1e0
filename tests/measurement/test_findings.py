"""What results of a measurement mean, and what the estimate of a step is calibrated with."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from tests.measurement.results import CPU, HEALTHY, LINK, TPU, error, links, not_ok, outcome, rate
from tpuport.cost import CHIPS
from tpuport.cost.calibration import Calibration, read_calibration
from tpuport.doctor.versions import TESTED
from tpuport.foundation.errors import UsageError
from tpuport.measurement.judging import calibrate
from tpuport.measurement.records import FailedJob, Result
from tpuport.measurement.report import MeasureReport, make_report

HELD = (
    "RuntimeError: Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by"
    " process with pid 4711. Not attempting to load libtpu.so in this process."
)
OLD_LIBTPU = (
    "RuntimeError: Unable to initialize backend 'tpu': INVALID_ARGUMENT: Mismatched PJRT plugin"
    " PJRT API version (0.40) and framework PJRT API version 0.90)."
)


def report_of(*results: Result, **given) -> MeasureReport:
    return make_report(
        outcome(*results, **given), TESTED, has_tpu=True, measured_at="2026-11-25T22:00:00+00:00"
    )


def test_a_healthy_slice_has_no_findings():
    assert not_ok(outcome(*HEALTHY)) == []


def test_no_tpu_is_said_and_speeds_are_not_judged():
    slow = (*links(1.0, 1e9), rate("memory", "read", 1e9, 8e11))
    ((status, topic, text, fix),) = not_ok(outcome(*slow, device=CPU), has_tpu=False)
    assert (status, topic, fix) == ("note", "devices", None)
    assert "no TPU or GPU" in text
    assert "meaningless" in text


def test_a_tpu_that_jax_does_not_use():
    ((status, _, text, fix),) = not_ok(outcome(device=CPU))
    assert status == "problem"
    assert text.endswith("this machine has a TPU that jax does not use")
    assert fix == "unset JAX_PLATFORMS; tpuport doctor"


def test_of_a_gpu_nothing_is_expected():
    gpu = dataclasses.replace(CPU, platform="gpu", kind="NVIDIA H100", chip="", small=False)
    ((status, _, text, _),) = not_ok(outcome(device=gpu), has_tpu=False)
    assert status == "note"
    assert "nothing is expected" in text


def test_a_busy_chip_is_named_with_the_process_that_holds_it():
    found = outcome(device=None, troubles=(FailedJob("devices", HELD, ""),))
    text = "the TPU is held by another process, 4711"
    expected = [("problem", "devices", text, "ps -fp 4711")]
    assert not_ok(found) == expected
    assert not_ok(found, libtpu="0.0.20") == expected


def test_a_libtpu_that_does_not_fit_is_told_apart():
    found = outcome(device=None, troubles=(FailedJob("devices", OLD_LIBTPU, ""),))
    ((_, topic, text, fix),) = not_ok(found, libtpu="0.0.20")
    assert (topic, text) == ("devices", OLD_LIBTPU)
    assert fix == f"pip install libtpu=={TESTED['libtpu']}"
    ((_, _, _, fix),) = not_ok(found)
    assert fix != f"pip install libtpu=={TESTED['libtpu']}"


NO_TPU = (
    "RuntimeError: Unable to initialize backend 'tpu': NOT_FOUND: TPU initialization failed: No"
    " jellyfish device found. (set JAX_PLATFORMS='' to automatically choose an available backend)"
)


@pytest.mark.parametrize(
    ("error", "text", "fix"),
    [
        (NO_TPU, "this machine has no TPU, or none that this user may open", "ls -l /dev/accel*"),
        (
            "RuntimeError: Unable to initialize backend 'tpu': NOT_FOUND: GetPjrtApi not found in"
            " /lib/libm.so.6 (set JAX_PLATFORMS='' to automatically choose an available backend)",
            "GetPjrtApi not found in /lib/libm.so.6",
            "unset TPU_LIBRARY_PATH",
        ),
        ("AssertionError: ", "of which no package is installed", "unset JAX_PLATFORMS"),
    ],
)
def test_a_platform_that_jax_was_told_to_use_and_has_not(error: str, text: str, fix: str):
    found = outcome(device=None, troubles=(FailedJob("devices", error, ""),))
    ((status, topic, said, remedy),) = not_ok(found, has_tpu=False)
    assert (status, topic) == ("problem", "devices")
    assert said.endswith(text)
    assert (remedy or "").startswith(fix)


def test_what_fails_under_another_libtpu_is_blamed_on_it():
    trouble = FailedJob("kernel splash", "JaxRuntimeError: Mosaic failed to compile", "")
    first, second = not_ok(outcome(troubles=(trouble,)), libtpu="0.0.20")
    fix = f"pip install libtpu=={TESTED['libtpu']}"
    assert first == ("note", "libtpu", f"0.0.20; tpuport is tested with {TESTED['libtpu']}", fix)
    assert second[:2] == ("problem", "kernel splash")
    assert "libtpu 0.0.20" in second[2]
    assert second[3] == fix
    ((_, _, text, fix),) = not_ok(outcome(troubles=(trouble,)))
    assert text == trouble.text
    assert fix == "attach the page to an issue of tpuport"


def test_an_error_with_a_remedy_keeps_it():
    text = "MissingExtraError: it needs diffusers. What to do: pip install x"
    ((_, _, said, fix),) = not_ok(outcome(troubles=(FailedJob("program a", text, ""),)))
    assert (said, fix) == ("MissingExtraError: it needs diffusers.", "pip install x")


@pytest.mark.parametrize("value", [0.021, math.inf])
def test_a_kernel_that_differs_is_a_problem_on_any_device(value: float):
    words = "0.021" if math.isfinite(value) else "not a number"
    for device in (TPU, CPU):
        found = not_ok(outcome(error("kernel ring", value), device=device), has_tpu=device is TPU)
        (problem,) = (one for one in found if one[0] == "problem")
        assert problem[2].startswith("differs: kernel ring: ")
        assert f": {words} where 0.02 is allowed" in problem[2]
        assert "kernel='full'" in (problem[3] or "")
    assert not_ok(outcome(error("kernel ring", 0.02))) == []


def test_a_link_slower_than_the_others_is_a_problem():
    ((status, topic, text, fix),) = not_ok(outcome(*links(8e10, 8e10, 2e10, 8e10)))
    assert (status, topic) == ("problem", "links")
    assert text == "link 2 - 3 carries 20 GB/s, the median is 80 GB/s, and 90 GB/s is stated"
    assert fix


def test_links_that_are_all_slow_are_problems_too():
    slow = 0.4 * LINK
    assert [one[0] for one in not_ok(outcome(*links(slow, slow)))] == ["problem", "problem"]


@pytest.mark.parametrize("share", [0.3, 2.0])
def test_where_the_cost_model_is_off_is_a_note(share: float):
    ((status, topic, text, _),) = not_ok(outcome(rate("memory", "read", share * 1e12, 1e12)))
    assert (status, topic) == ("note", "memory")
    assert text.endswith("where 1 TB/s is expected")


def test_rates_are_those_that_were_measured():
    found = calibrate(outcome(*HEALTHY), "today", TESTED)
    assert found is not None
    assert found.dense_efficiency == pytest.approx(0.9)
    assert (found.int8_ops, found.hbm_bandwidth) == (1.6e15, 1.4e12)
    # One collective took 1.25 times as long as expected, one 0.8 times.
    assert found.ici_link_bandwidth == pytest.approx(9e10)
    assert found.kernel_factor == pytest.approx(1.2)
    chip = found.apply(CHIPS["v6e"])
    assert chip.hbm_bandwidth == 1.4e12
    assert chip.peak("int8", "int8") * 0.9 == pytest.approx(1.6e15)
    assert chip.bf16_flops == CHIPS["v6e"].bf16_flops
    with pytest.raises(UsageError, match=r"measured on\s'TPU v6 lite'.*--measure` on a v5e"):
        found.apply(CHIPS["v5e"])


def test_what_was_not_measured_stays_as_it_is_stated():
    found = calibrate(outcome(HEALTHY[2]), "today", {})
    assert found is not None
    expected = dataclasses.replace(CHIPS["v6e"], hbm_bandwidth=1.4e12)
    assert found.apply(CHIPS["v6e"]) == expected
    assert calibrate(outcome(device=None), "today", {}) is None


def test_a_cpu_calibrates_nothing():
    found = calibrate(outcome(HEALTHY[2], device=CPU), "today", {})
    assert found is not None
    with pytest.raises(UsageError, match=r"measured on 'cpu' \(cpu\)"):
        found.apply(CHIPS["v5e"])


def test_the_file_is_what_compile_for_reads(tmp_path: Path):
    report = report_of(*HEALTHY)
    path = report.save(tmp_path / "measurement.json")
    found = read_calibration(path)
    assert report.calibration is not None
    assert found == dataclasses.replace(report.calibration, source=str(path))
    assert str(found).startswith(f"{path}: 8 x TPU v6 lite, 2026-11-25T22:00:00+00:00, jax ")
    assert MeasureReport.from_json(path.read_text()) == report
    assert read_calibration(found) is found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{}", "is no file of `tpuport doctor --measure`"),
        ("not json", "is no file of"),
        ('{"calibration": null}', "is no file of"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str | None, message: str):
    path = tmp_path / "m.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_calibration(path)


@pytest.mark.parametrize(
    "rates", [{"hbm_bandwidth": 0.0}, {"dense_efficiency": 1.2}, {"kernel_factor": "nan"}]
)
def test_rates_that_no_device_has_are_refused(tmp_path: Path, rates):
    path = tmp_path / "m.json"
    known = {"device_kind": "k", "platform": "tpu", "num_devices": 1, "measured_at": ""}
    path.write_text(json.dumps({"calibration": {**known, **rates}}))
    with pytest.raises(UsageError, match="which no device has"):
        read_calibration(path)
    assert Calibration(**known).kernel_factor is None


def test_page_and_text_show_numbers_findings_and_the_way_on():
    report = report_of(*HEALTHY, error("kernel <b>ring", 0.5))
    page, text = report.to_html(), str(report)
    assert "<b>ring" not in page
    assert "&lt;b&gt;ring" in page
    for shown in (page, text):
        assert "8 x TPU v6 lite: 1 problem" in shown
        assert "differs" in shown
        assert "1.4 TB/s" in shown
        assert "90.0% of the peak" in shown
        assert "1.6 Pop/s" in shown
        assert "meaningless" not in shown
    assert "calibration=" in text
    for shown in (report_of(device=CPU).to_html(), str(report_of(device=CPU))):
        assert "meaningless" in " ".join(shown.split())
    assert "cannot have the devices" in str(report_of(device=None))


def test_a_file_that_is_no_report_is_refused():
    with pytest.raises(UsageError, match="no measurement as JSON"):
        MeasureReport.from_json("[]")
