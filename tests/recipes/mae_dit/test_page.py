"""The page of runs: what logs and pictures hold, and nothing that they could execute."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from recipes.mae_dit import page
from recipes.mae_dit.__main__ import app
from recipes.mae_dit.watching import Log, read_log, write_grid
from tpuport.foundation.errors import UsageError

HOSTILE = "<script>alert(1)</script>"


def run_at(folder: Path, lines: list[object], grids: int = 0) -> Path:
    folder.mkdir(parents=True)
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "log.jsonl").write_text(text, encoding="utf-8")
    for number in range(grids):
        images = np.full((3, 4, 4, 3), number, np.uint8)
        write_grid(folder / "grids" / f"step-{number:06d}.png", images)
    return folder


def test_the_command_writes_curves_pictures_and_measures(tmp_path):
    steps = [{"step": s, "loss": 1 / s, "evaluate/FID": 9.0 - s, "logits": -s} for s in (1, 2, 4)]
    run = run_at(tmp_path / "run", [*steps, {"step": 3, HOSTILE: 1.0}], grids=20)
    sampled = tmp_path / HOSTILE.replace("/", "")
    write_grid(sampled / "grid.png", np.zeros((2, 4, 4, 3), np.uint8))
    (tmp_path / "m.json").write_text(json.dumps({"FID": 1.23456}), encoding="utf-8")
    out = tmp_path / "pages" / "page.html"
    given = [str(run), str(sampled), "--out", str(out), "--measures", str(tmp_path / "m.json")]
    found = CliRunner().invoke(app, ["page", *given, "--picture", str(sampled / "grid.png")])
    assert found.exit_code == 0, found.output
    assert "page.html shows 2 runs" in found.output.replace("\n", "")
    text = out.read_text(encoding="utf-8")
    assert text.count("<svg") == 4
    assert "step 2: evaluate/FID 7" in text
    assert "logits, -4 to 0" in text
    assert text.count("<img") == 8 + 1 + 1
    assert "step-000000.png" in text
    assert "step-000019.png" in text
    assert "1.2346" in text
    assert "<script" not in text

    elements: list[tuple[str, dict[str, str | None]]] = []
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, attrs: elements.append((tag, dict(attrs)))
    reader.feed(text)
    sources = [attributes["src"] or "" for tag, attributes in elements if tag == "img"]
    assert all(re.fullmatch(r"data:image/png;base64,[\w+/=]+", source) for source in sources)
    assert not [attributes for _, attributes in elements if "href" in attributes]


def test_a_log_that_was_cut_off_is_read_up_to_there(tmp_path):
    run = run_at(tmp_path / "run", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, [1], 7])
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 1, "loss": 3.0}\n{"step": 3, "lo')
    log = read_log(run / "log.jsonl")
    assert log == Log({"loss": {1: 3.0}}, odd=1, broken=3)
    page.write_page(tmp_path / "page.html", [run])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "1 value not finite, left out." in text
    assert "3 lines of the log could not be read." in text


def test_long_curves_keep_their_ends():
    points = page.thinned({step: float(step) for step in range(5, 10_000)})
    assert len(points) == 300
    assert (min(points), max(points)) == (5, 9999)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"has no log\.jsonl and no pictures"):
        page.write_page(tmp_path / "page.html", [tmp_path])
    (tmp_path / "grid.png").write_bytes(b"PNG")
    with pytest.raises(UsageError, match=r"grid\.png is no picture"):
        page.write_page(tmp_path / "page.html", [tmp_path])
    (tmp_path / "m.json").write_text('{"FID": "low"}')
    with pytest.raises(UsageError, match="no object of numbers"):
        page.read_measures(tmp_path / "m.json")
    assert not (tmp_path / "page.html").exists()
