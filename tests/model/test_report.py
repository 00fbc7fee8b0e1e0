"""The port report: what counts as agreement, and what the text, the JSON and the page show."""

import io
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from tpuport.foundation.errors import UsageError
from tpuport.reports.records import (
    Branch,
    Divergence,
    HoistedConstant,
    Parity,
    RegisteredOp,
    Retrace,
    Rewrite,
    ShimUse,
    Timing,
)
from tpuport.reports.report import PortReport

HOSTILE = "<script>alert(1)</script>"
GOOD = Parity(
    "output.logits",
    kind="output",
    shape=(2, 3),
    dtype="float32",
    max_abs=2e-6,
    max_rel=1e-6,
    where=(1, 2),
    expected=2.0,
    got=2.000002,
    tolerance=1e-4,
)


def compare(expected: object, got: object, *, tolerance: float = 1e-4) -> Parity:
    return Parity.compare(
        "output",
        np.asarray(expected),
        np.asarray(got),
        kind="output",
        tolerance=tolerance,
    )


def full_report(text: str = "x[mask] = 0") -> PortReport:
    """A report with one record of every sort, all free text being `text`."""
    report = PortReport(f"Model{text}", class_file=text, versions={text: "1.0"}, verified=True)
    report.num_parameters, report.parameter_bytes = 8_330_000_000, 33_320_000_000
    report.num_buffers, report.buffer_bytes = 12, 48
    report.notes.append(text)
    report.add(
        replace(GOOD, path=f"output.{text}"),
        Rewrite(text, 7, code=text, before=text, after=f"y = {text}", safety="exact"),
        Branch(text, 8, source=text, how=text),
        ShimUse(text, target=text, reason=text, calls=3),
        RegisteredOp(text, reason=text, calls=1),
        Retrace(text, 2, (f"args[0]: {text} -> {text}", text)),
        HoistedConstant(text, shape=(4, 4), dtype=text, bytes=1 << 20),
    )
    report.timing = Timing(observe=0.5, trace=2.0, compile=70.0)
    return report


def failed_report() -> PortReport:
    report = full_report()
    report.verified, report.why_not_verified = False, "the outputs differ"
    report.add(
        replace(GOOD, path="output.bad", max_rel=0.31, got=9.5),
        Divergence("blocks.3.attn", cls="Attention", max_rel=0.31, input_max_rel=2.1e-7),
    )
    return report


class Page(HTMLParser):
    """Reads a page: its elements in order, its text, and whether every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def classes(self, tag: str) -> list[str | None]:
        return [attributes.get("class") for name, attributes in self.elements if name == tag]


class TestParity:
    @pytest.mark.parametrize(
        ("expected", "got", "max_abs", "max_rel", "where", "ok"),
        [
            ([[1.0, 2.0], [4.0, -8.0]], [[1.0, 2.0], [4.0, -8.0]], 0, 0, (0, 0), True),
            ([[1.0, 2.0], [4.0, -8.0]], [[1.0, 2.5], [4.0, -8.25]], 0.5, 0.0625, (0, 1), False),
            ([1.0, 2.0], [1.0, math.nan], math.inf, math.inf, (1,), False),
            ([1.0, math.nan], [1.0, 2.0], math.inf, math.inf, (1,), False),
            ([1.0, math.nan], [1.0, math.nan], 0, 0, (0,), True),
            ([math.nan], [math.nan], 0, 0, (0,), True),
            ([math.nan, 4.0], [math.nan, 5.0], 1.0, 0.25, (1,), False),
            ([math.inf, 4.0], [math.inf, 4.0], 0, 0, (0,), True),
            ([math.inf, 4.0], [-math.inf, 4.0], math.inf, math.inf, (0,), False),
            ([math.inf, 4.0], [math.nan, 4.0], math.inf, math.inf, (0,), False),
            ([0.0, 0.0], [0.0, 1e-9], 1e-9, math.inf, (1,), False),
            (3.0, 3.0, 0, 0, (), True),
            (2.0, 3.0, 1.0, 0.5, (), False),
            ([True, False], [True, True], 1.0, 1.0, (1,), False),
            ([2**60], [2**60 + 1], 1.0, 2.0**-60, (0,), True),
            ([3 + 4j], [3 + 3j], 1.0, 0.25, (0, 1), False),
        ],
    )
    def test_compare(
        self,
        expected: object,
        got: object,
        max_abs: float,
        max_rel: float,
        where: tuple[int, ...],
        ok: bool,
    ) -> None:
        found = compare(expected, got)
        assert (found.max_abs, found.max_rel, found.where) == (max_abs, max_rel, where)
        assert found.ok is ok

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_what_uninitialized_memory_holds_is_compared_without_a_warning(
        self, dtype: str
    ) -> None:
        """An exponent of ones with the quiet bit off: a signalling NaN."""
        bits = {"float32": 0x7F800001, "float16": 0x7C01, "bfloat16": 0x7F81}[dtype]
        size = "u4" if dtype == "float32" else "u2"
        floats = np.dtype(dtype)
        value = np.concatenate([np.array([bits], size).view(floats), np.array([4.0], floats)])
        other = np.concatenate([value[:1], np.array([5.0], floats)])
        assert compare(value, value).max_abs == 0
        assert compare(value, other).max_abs == 1
        assert compare(value, value[::-1]).max_abs == math.inf

    def test_an_empty_value_agrees(self) -> None:
        found = compare(np.zeros((0, 3)), np.zeros((0, 3)))
        assert found.ok
        assert (found.shape, found.where, found.used) == ((0, 3), (), 0)

    @pytest.mark.parametrize(
        ("got", "problem"),
        [
            (np.zeros((2, 1)), "float64[2, 1] where eager PyTorch gives float64[2]"),
            (np.zeros(2, np.float32), "float32[2] where eager PyTorch gives float64[2]"),
        ],
    )
    def test_another_shape_or_dtype_never_agrees(self, got: np.ndarray, problem: str) -> None:
        found = compare(np.zeros(2), got, tolerance=1e9)
        assert found.problem == problem
        assert not found.ok

    def test_integers_that_differ_beyond_float_precision_are_not_identical(self) -> None:
        assert not compare([2**60], [2**60 + 1], tolerance=0.0).ok

    def test_float64_accepts_what_is_rounding(self) -> None:
        wrong = replace(compare([1e-9], [-2e-9]), eager_error=1e-9, port_error=2e-9)
        assert not wrong.ok
        accepted = replace(wrong, rounding=0.5)
        assert (accepted.ok, accepted.used, accepted.is_rounding) == (True, 0.5, True)
        assert not replace(wrong, rounding=1.5).ok
        assert not replace(compare([1e-9], [math.nan]), rounding=0.5).ok
        text = " ".join(str(PortReport("Model", parity=[accepted], verified=True)).split())
        assert "which is rounding: from its result in float64, eager PyTorch is 1e-9 away" in text
        assert "2e-9 abs 4e-9 abs" in text

    def test_decisions_that_rounding_turned_are_told(self) -> None:
        taken = replace(compare([1.0], [1.00001]), turned=7)
        text = " ".join(str(PortReport("Model", parity=[taken, GOOD], verified=True)).split())
        assert "takes up to 7 decisions as the port does where 1 value of these are" in text
        wrong = replace(compare([1.0], [2.0]), turned=1, eager_error=1e-9, port_error=1.0)
        text = " ".join(str(PortReport("Model", parity=[wrong])).split())
        assert "the port 1, with 1 decision of rounding taken as the port does." in text

    @pytest.mark.parametrize(
        "change",
        [
            # What a producer gets that takes the maximum without looking at NaN, or ignoring it.
            {"got": math.nan, "max_abs": math.nan, "max_rel": math.nan},
            {"got": math.nan, "max_abs": 0.0, "max_rel": 0.0},
            {"got": math.inf, "max_abs": 0.0, "max_rel": 0.0},
            {"max_abs": math.nan, "max_rel": math.nan},
            {"expected": math.nan, "max_abs": 0.0, "max_rel": 0.0},
            {"problem": "missing in the port", "max_abs": 0.0, "max_rel": 0.0},
        ],
    )
    def test_nan_is_never_agreement(self, change: dict[str, float]) -> None:
        assert GOOD.ok
        changed = replace(GOOD, **change)
        assert (changed.ok, changed.used) == (False, math.inf)

    def test_the_limit_itself_is_within_tolerance(self) -> None:
        assert replace(GOOD, max_rel=1e-4).ok
        assert not replace(GOOD, max_rel=math.nextafter(1e-4, 1)).ok


class TestVerdict:
    def test_agrees_only_where_something_was_compared(self) -> None:
        report = PortReport("Model", verified=True)
        assert (report.verdict, report.ok, report.worst) == ("not verified", False, None)
        report.add(GOOD)
        assert (report.verdict, report.ok, report.worst) == ("agrees", True, GOOD)

    def test_values_that_agree_are_not_enough(self) -> None:
        report = PortReport("Model", parity=[GOOD], why_not_verified="gradients were not compared")
        assert report.verdict == "not verified"
        assert "Gradients were not compared." in str(report)
        assert replace(report, verified=False).verdict == "differs"

    def test_one_bad_value_outweighs_verified(self) -> None:
        assert (
            PortReport("M", verified=True, parity=[GOOD, replace(GOOD, got=math.nan)]).verdict
            == "differs"
        )

    def test_worst_uses_most_of_its_own_tolerance(self) -> None:
        loose = replace(GOOD, path="loose", max_rel=1e-3, tolerance=1.0)
        tight = replace(GOOD, path="tight", max_rel=1e-4, tolerance=2e-4)
        broken = replace(GOOD, path="broken", got=math.nan)
        report = PortReport("Model", parity=[GOOD, loose, tight])
        assert report.worst == tight
        report.add(broken)
        assert [p.path for p in report.by_severity] == ["broken", "tight", "output.logits", "loose"]
        assert report.worst == broken


def test_timed_adds_up_and_counts_a_stage_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    report = PortReport("Model")
    clock = iter([1.0, 3.5, 10.0, 10.5])
    monkeypatch.setattr("tpuport.reports.data.time.perf_counter", lambda: next(clock))
    with report.timed("trace"):
        pass
    with pytest.raises(KeyError), report.timed("trace"):
        raise KeyError
    assert report.timing == Timing(trace=3.0)


class TestText:
    def test_an_empty_report_is_a_verdict(self) -> None:
        assert str(PortReport("Model")) == (
            "? Model has not been verified against eager PyTorch\n  No value has been compared."
        )

    def test_everything_is_shown(self) -> None:
        text = str(full_report())
        for expected in (
            "✔ Modelx[mask] = 0 agrees with eager PyTorch",
            "1 value compared, all within tolerance.",
            "The worst is output.x[mask] = 0, 1e-6 relative where",
            "8.33 B parameters (31.0 GiB) · 12 buffer elements (48 B)",
            "Parity, worst first",
            "Rewritten (1)",
            "    - x[mask] = 0\n    + y = x[mask] = 0",
            "Branches on traced values (1)",
            "Shims (1)",
            "3 calls",
            "Ops that tpuport lowers (1)",
            "Retraces (1)",
            "Constants passed as arguments (1, 1.0 MiB)",
            "Time, 1 min 12 s",
            "observe  █  ",
            "500 ms",
        ):
            assert expected in text
        assert "rewrite  █" not in text

    def test_a_failure_says_where_it_starts(self) -> None:
        text = str(failed_report())
        assert text.startswith("✘ Modelx[mask] = 0 does not agree with eager PyTorch")
        assert "2 values compared, 1 of them out of tolerance." in text
        assert "The outputs differ." in text
        assert "The first submodule that differs is blocks.3.attn (Attention)" in text
        assert "9.5 where eager PyTorch gives 2 at [1, 2]" in text

    def test_parity_is_capped_worst_first(self) -> None:
        rows = [replace(GOOD, path=f"grad.{i:03}", max_rel=i * 1e-8) for i in range(300)]
        text = str(PortReport("Model", parity=rows, verified=True))
        shown = re.findall(r"✔  (grad\.\d+)", text)
        assert shown == [f"grad.{i:03}" for i in range(299, 279, -1)]
        assert "+280 more" in text

    def test_lists_and_source_are_capped(self) -> None:
        report = PortReport("Model")
        report.add(*(RegisteredOp(f"aten.op{i}", reason="", calls=1) for i in range(23)))
        long = "\n".join(f"line {i}" for i in range(40))
        report.add(Rewrite("m.py", 1, code="TPU101", before=long, after="x", safety="exact"))
        text = str(report)
        assert "aten.op19" in text
        assert "aten.op20" not in text
        assert "+3 more" in text
        assert "... 28 more lines" in text

    @pytest.mark.parametrize(
        "text", ["y" * 400, "a.b." * 100, "x = 1\n" * 50, "[bold]x[/]", ":smile:"]
    )
    def test_never_wider_than_100_columns_and_nothing_is_markup(self, text: str) -> None:
        lines = str(full_report(text)).splitlines()
        assert max(map(len, lines)) <= 100
        assert text.strip().replace("\n", "")[:6] in "".join(line.strip() for line in lines)

    def test_escape_sequences_never_reach_the_terminal(self) -> None:
        report = full_report("\x1b[31mred\x07\r\u202eevil\udc80")
        plain = str(report)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e\ud800-\udfff]", plain)
        assert r"\x1b[31mred\x07\r\u202eevil\udc80" in plain

    def test_rich_prints_it_at_the_width_of_the_terminal(self) -> None:
        out = io.StringIO()
        console = Console(file=out, width=60, force_terminal=True, color_system="truecolor")
        console.print(failed_report())
        assert "\x1b[" in out.getvalue()
        plain = Text.from_ansi(out.getvalue()).plain
        assert max(map(len, plain.splitlines())) <= 60
        assert "does not agree" in plain


class TestJson:
    @pytest.mark.parametrize("report", [PortReport("Model"), full_report(), failed_report()])
    def test_round_trip(self, report: PortReport) -> None:
        restored = PortReport.from_json(report.to_json())
        assert restored == report
        assert restored.to_json() == report.to_json()
        assert str(restored) == str(report)

    def test_is_standard_json_with_the_verdict(self) -> None:
        report = PortReport("Model", parity=[compare([1.0], [math.nan])])
        assert not re.search(r"\b(NaN|Infinity)\b", report.to_json())
        data = json.loads(report.to_json())
        assert (data["verdict"], data["ok"]) == ("differs", False)
        assert (data["parity"][0]["got"], data["parity"][0]["max_rel"]) == ("nan", "inf")
        restored = PortReport.from_json(report.to_json()).parity[0]
        assert math.isnan(restored.got)
        assert restored.max_rel == math.inf
        assert not restored.ok

    def test_numpy_scalars_are_plain_numbers(self) -> None:
        parity = replace(GOOD, max_rel=np.float32(0.5), where=(np.int64(3),))
        data = PortReport("Model", parity=[parity]).to_dict()["parity"][0]
        assert (data["max_rel"], data["where"]) == (0.5, [3])

    def test_another_format_is_refused(self) -> None:
        message = "Expected a port report of format 1, got format None"
        with pytest.raises(UsageError, match=message):
            PortReport.from_json("{}")


class TestHtml:
    def test_untrusted_text_is_escaped_everywhere(self) -> None:
        hostile = f"{HOSTILE}\"'><img src=x onerror=alert(1)>"
        report = full_report(hostile)
        report.parity.append(replace(GOOD, path=hostile, problem=hostile))
        report.parity += [replace(GOOD, path=f"{hostile}{i}") for i in range(40)]
        report.constants *= 20
        report.add(Divergence(hostile, cls=hostile, max_rel=0.1, input_max_rel=0.0))
        report.why_not_verified = hostile
        page = Page(report.to_html())
        assert {name for name, _ in page.elements} & {"script", "img", "iframe", "link"} == set()
        assert not [a for _, attributes in page.elements for a in attributes if a.startswith("on")]
        assert page.text.count(HOSTILE) > 40

    @pytest.mark.parametrize(
        "report", [PortReport("Model"), full_report(), failed_report()], ids=lambda r: r.verdict
    )
    def test_is_one_well_formed_page_that_loads_nothing(self, report: PortReport) -> None:
        text = report.to_html()
        page = Page(text)
        assert text.startswith("<!doctype html>")
        assert page.open == []
        assert not re.search(r"https?:|url\(|@import|\bsrc=", text)
        links = [a["href"] for name, a in page.elements if name == "a"]
        targets = {f"#{a['id']}" for name, a in page.elements if name == "section"}
        assert set(links) <= targets
        policies = [a["content"] for _, a in page.elements if a.get("http-equiv")]
        assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
        assert "prefers-color-scheme: dark" in text

    def test_an_empty_report_has_no_sections(self) -> None:
        page = Page(PortReport("Model").to_html())
        assert "No value has been compared." in page.text
        assert page.classes("section") == []
        assert page.classes("svg") == []

    def test_every_value_is_a_dot_and_failures_stand_out(self) -> None:
        report = failed_report()
        report.parity += [replace(GOOD, path=f"grad.{i}", kind="gradient") for i in range(300)]
        report.add(replace(GOOD, path="tiny", max_rel=0.5, max_abs=1e-9, rounding=0.1))
        circles = re.findall(
            r'class="(\w+)"', report.to_html().split('class="swarm"')[1].split("</svg>")[0]
        )
        dots = [c for c in circles if c in ("ok", "bad", "ring")]
        assert (len(dots), dots.count("bad"), dots.count("ring")) == (303, 1, 1)

    @pytest.mark.parametrize("error", [0.0, 1e-300, 1e-7, 1e300, math.inf, math.nan])
    def test_any_error_has_a_place_on_the_axis(self, error: float) -> None:
        rows = [
            replace(GOOD, path=str(i), max_rel=error, tolerance=t) for i in range(9) for t in (0, 1)
        ]
        page = Page(PortReport("Model", parity=rows).to_html())
        places = [float(a["cx"].rstrip("%")) for name, a in page.elements if name == "circle"]
        assert len(places) >= 18
        assert all(0 <= place <= 100 for place in places)

    def test_a_dot_out_of_tolerance_is_right_of_the_line(self) -> None:
        rows = [replace(GOOD, max_rel=e, tolerance=1e-4) for e in (0.99e-4, 1.01e-4)]
        page = Page(PortReport("Model", parity=rows).to_html())
        bad, ok = (float(a["cx"].rstrip("%")) for name, a in page.elements if name == "circle")
        limits = [a["x1"] for _, a in page.elements if a.get("class") == "limit"]
        assert ok < float(limits[0].rstrip("%")) < bad

    def test_a_rewrite_shows_both_sides_and_marks_what_changed(self) -> None:
        report = PortReport("Model")
        before, after = "y = 1\nn = mask.sum().item()\nz = 2", "y = 1\nn = mask.sum()\nz = 2"
        report.add(Rewrite("m.py", 3, code="TPU301", before=before, after=after, safety="exact"))
        page = report.to_html()
        assert '<span class="del">n = mask.sum()<mark>.item()</mark>\n</span>' in page
        assert '<span class="ins">n = mask.sum()\n</span>' in page
        assert page.count('<span class="same">y = 1\n</span>') == 2


class TestSave:
    @pytest.mark.parametrize(
        ("suffix", "start"), [(".json", "{"), (".html", "<!doctype html>"), (".TXT", "✔ Model")]
    )
    def test_the_suffix_chooses_the_format(self, tmp_path: Path, suffix: str, start: str) -> None:
        path = full_report().save(tmp_path / f"report{suffix}")
        assert path.read_text(encoding="utf-8").startswith(start)
        assert [p.name for p in tmp_path.iterdir()] == [f"report{suffix}"]

    @pytest.mark.parametrize("name", ["report.pdf", "report"])
    def test_another_suffix_is_refused(self, tmp_path: Path, name: str) -> None:
        message = r"ending in \.json, \.html or \.txt, got .*report\.save\('report\.html'\)"
        with pytest.raises(UsageError, match=message):
            PortReport("Model").save(tmp_path / name)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("broken", ["write", "replace"])
    def test_a_failure_leaves_the_old_file_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
    ) -> None:
        path = tmp_path / "report.json"
        path.write_text("old")
        written: list[str] = []

        def fail_write(self: Path, data: str, **options: object) -> int:
            self.write_bytes(data[:10].encode())
            written.append(self.name)
            raise OSError("disk full")

        def fail_replace(source: Path, target: Path) -> None:
            written.append(source.name)
            assert PortReport.from_json(source.read_text()).model == "Model"
            raise OSError("disk full")

        if broken == "write":
            monkeypatch.setattr(Path, "write_text", fail_write)
        else:
            monkeypatch.setattr(os, "replace", fail_replace)
        with pytest.raises(OSError, match="disk full"):
            PortReport("Model").save(path)
        assert written
        assert written != ["report.json"]
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]

    def test_paths_that_are_not_unicode_can_be_saved(self, tmp_path: Path) -> None:
        report = full_report("dir\udcff/m.py")
        for suffix in (".json", ".html", ".txt"):
            assert "udcff" in report.save(tmp_path / f"report{suffix}").read_text(encoding="utf-8")
        assert PortReport.from_json((tmp_path / "report.json").read_text()) == report


def test_a_report_is_read_without_torch_or_jax() -> None:
    code = (
        "import sys; from tpuport.reports.report import PortReport; r = PortReport('M');"
        "str(r); r.to_html(); r.to_json();"
        "print(*({'torch', 'jax', 'torchax'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == ""
