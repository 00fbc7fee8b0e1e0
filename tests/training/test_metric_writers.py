"""Sinks that have pictures: what they hold after a kill, and which run they resume."""

import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.training.test_fit import batches, new_step
from tpuport.training import JsonLines, TensorBoard, WandB, fit

PICTURE = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)

WRITES = """
import os, signal, sys
import numpy as np
from tpuport.training import TensorBoard
board = TensorBoard(sys.argv[1])
board.start(0)
for step in range(1, 5):
    board.write(step, {"loss": 1.0 / step})
    board.write_pictures(step, {"drawn": np.full((2, 3, 3), step, np.uint8)})
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_run(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WRITES, str(folder)], check=False)
    assert done.returncode == -9


def read_events(folder: Path) -> list[Any]:
    """Return all events of a folder, those that are hidden later among them."""
    events: Any = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        content, start = file.read_bytes(), 0
        while start < len(content):  # length, checksum, event, checksum
            (size,) = struct.unpack_from("<Q", content, start)
            found.append(events.Event.FromString(content[start + 12 : start + 12 + size]))
            start += size + 16
    return found


def test_nothing_that_tensorboard_was_given_is_lost_by_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    killed_run(tmp_path)
    values = [(e.step, v) for e in read_events(tmp_path) for v in e.summary.value]
    assert [(step, value.tag) for step, value in values] == [
        (step, tag) for step in range(1, 5) for tag in ("loss", "drawn")
    ]
    assert values[0][1].simple_value == 1.0
    assert values[1][1].image.height == 2
    board = TensorBoard(tmp_path)
    board.start(2)
    board.close()
    last = read_events(tmp_path)[-1]
    assert last.session_log.status == last.session_log.START
    assert last.step == 3


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    """By its own reader, after a run that was killed and goes on from its state of step 2."""
    pytest.importorskip("tensorboardX")
    reader: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    image: Any = pytest.importorskip("PIL.Image")
    import io

    killed_run(tmp_path)
    board = TensorBoard(tmp_path)
    board.start(2)
    board.write(3, {"loss": 7.0})
    board.write_pictures(3, {"drawn": PICTURE})
    board.close()
    found = reader.EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 1.0), (2, 0.5), (3, 7.0)]
    pictures = {
        e.step: np.asarray(image.open(io.BytesIO(e.encoded_image_string)))
        for e in found.Images("drawn")
    }
    assert [*pictures] == [1, 2, 3]
    np.testing.assert_array_equal(pictures[3], PICTURE)
    assert (pictures[2] == 2).all()


class _Run:
    """What a run of Weights & Biases is asked to do."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.logged, self.ended = options, [], False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.ended = True


def test_a_resumed_run_of_wandb_is_the_same_one(tmp_path: Path, monkeypatch: Any) -> None:
    made: list[_Run] = []

    def init(**options: Any) -> _Run:
        made.append(_Run(options))
        return made[-1]

    wandb = SimpleNamespace(init=init, Image=lambda picture: ("picture", picture.shape))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("tpuport.training.metric_writers._has", lambda name: True)
    for step in (0, 4):  # two processes, as it were
        sink = WandB("pictures", id_file=tmp_path / "run" / "wandb.id")
        sink.start(step)
        sink.write(step + 1, {"loss": 2.0})
        sink.write_pictures(step + 1, {"drawn": PICTURE})
        sink.close()
    first, second = made
    assert first.options == second.options
    assert len(first.options["id"]) == 12
    assert first.options["resume"] == "allow"
    assert second.logged == [(5, {"loss": 2.0}), (5, {"drawn": ("picture", (2, 3, 3))})]
    assert first.ended
    assert second.ended


class _Album(JsonLines):
    """A sink that keeps pictures."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.pictures: list[tuple[int, str]] = []

    def write_pictures(self, step: int, pictures: Any) -> None:
        self.pictures += [(step, name) for name in pictures]


def test_what_is_drawn_goes_to_the_sinks_before_the_state_is_saved(tmp_path: Path) -> None:
    """So a run that is killed meanwhile goes on before the step, and draws its picture."""
    album, plain = _Album(tmp_path / "album.jsonl"), JsonLines(tmp_path / "plain.jsonl")
    saved: dict[int, list[str]] = {}

    def draw(step: Any, state: Any) -> dict[str, Any]:
        states = [one.name for one in (tmp_path / "states").iterdir() if one.name.isdigit()]
        saved[int(state.step)] = states
        return {"drawn": PICTURE, "number": 2.0}

    options: dict[str, Any] = {
        "save_every": 2,
        "evaluate_every": 2,
        "checkpoints": tmp_path / "states",
    }
    fit(new_step(), batches(), steps=4, evaluate=draw, sinks=[album, plain], **options)
    assert album.pictures == [(2, "evaluate/drawn"), (4, "evaluate/drawn")]
    assert saved[2] == []
    assert "4" not in saved[4]
    text = plain.path.read_text()
    assert text.count('"evaluate/number": 2.0') == 2
    assert "drawn" not in text


def test_an_evaluation_that_fails_costs_no_training(tmp_path: Path) -> None:
    def fail(step: Any, state: Any) -> Any:
        raise ConnectionError("lost")

    options: dict[str, Any] = {
        "save_every": 2,
        "evaluate_every": 2,
        "checkpoints": tmp_path / "states",
    }
    with pytest.raises(ConnectionError):
        fit(new_step(), batches(), steps=4, evaluate=fail, **options)
    del options["evaluate_every"]
    state = fit(new_step(), batches(), steps=2, **options)
    assert int(state.step) == 2
    assert (tmp_path / "states" / "2").is_dir()
