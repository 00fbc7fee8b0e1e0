"""What a forward reads of the host's changing state: later calls see it as eager PyTorch does."""

import array
import ctypes
import itertools
import multiprocessing
import os
import pathlib
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError

TABLE, BYTES, NUMBERS = np.ones(5000), bytearray(b"\x01" * 9000), array.array("d", [1.0])
VALUE, SHARED = ctypes.c_double(1.0), multiprocessing.Value("d", 1.0)
LOCAL, EVENT, SEEDED = threading.local(), threading.Event(), torch.Generator()
STEPS, DRAWS, DRAWN = itertools.count(), random.Random(0), np.random.default_rng(0)
FOLDER: list[pathlib.Path] = []


class Reads(nn.Module):
    """Reads all that the tests change; `suffix` makes a name that no code spells out."""

    suffix = "GAIN"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        file = FOLDER[0] / "gain.txt"
        there = float(file.read_text()) if file.exists() else 0.0
        read = [
            *(TABLE[0], BYTES[0], NUMBERS[0], VALUE.value, SHARED.value),
            *(getattr(LOCAL, "gain", 1.0), EVENT.is_set(), SEEDED.initial_seed() % 100),
            *(float(os.environ.get("TPUPORT_TEST_" + self.suffix, "1")), there),
            *(len(os.listdir(FOLDER[0])), torch.initial_seed() % 100),
            float(np.loadtxt(FOLDER[0] / "table.txt")),
        ]
        return x * torch.tensor([float(one) for one in read])


def _write(name: str, text: str) -> None:
    (FOLDER[0] / name).write_text(text)


CHANGES: dict[str, Callable[[], Any]] = {
    "array": lambda: TABLE.__setitem__(0, 3.0),
    "bytes": lambda: BYTES.__setitem__(0, 3),
    "array.array": lambda: NUMBERS.__setitem__(0, 3.0),
    "ctypes": lambda: setattr(VALUE, "value", 3.0),
    "shared value": lambda: setattr(SHARED, "value", 3.0),
    "thread": lambda: setattr(LOCAL, "gain", 3.0),
    "event": EVENT.set,
    "generator": lambda: SEEDED.manual_seed(5),
    "variable": lambda: os.environ.__setitem__("TPUPORT_TEST_GAIN", "3"),
    "new file": lambda: _write("gain.txt", "2.5"),
    "file": lambda: _write("gain.txt", "3.25"),
    "seed": lambda: torch.manual_seed(77),
    "table": lambda: _write("table.txt", "4.75"),
}


def test_a_later_call_sees_what_changed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TPUPORT_TEST_GAIN", raising=False)
    monkeypatch.setattr(f"{__name__}.FOLDER", [tmp_path])
    _write("table.txt", "2.0")
    torch.manual_seed(3)
    module, x = Reads(), torch.ones(13)
    ported = tpuport.convert(module, verify=False)
    for name, change in CHANGES.items():
        before = module(x)
        for _ in range(2):  # the second call has the same program
            assert torch.equal(tpuport.to_torch(ported(x)), before), name
        change()
        assert not torch.equal(module(x), before), name
        count = len(ported.report.retraces)
        assert torch.equal(tpuport.to_torch(ported(x)), module(x)), name
        assert len(ported.report.retraces) == count + 1
    assert open is __builtins__["open"]  # type: ignore[index]
    assert os.stat(tmp_path).st_mode == tmp_path.stat().st_mode


def test_another_thread_has_values_of_its_own():
    local = threading.local()
    ported = tpuport.convert(lambda x: x * getattr(local, "gain", 1.0), verify=False)
    found: list[Any] = []

    def run(gain: float) -> None:
        local.gain = gain
        found.append(ported(torch.ones(1)).tolist())

    for gain in (2.0, 3.0):
        run(gain)
        thread = threading.Thread(target=run, args=(gain + 10,))
        thread.start()
        thread.join()
    assert found == [[2.0], [12.0], [3.0], [13.0]]


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("TPU405", lambda x: x * next(STEPS)),
        ("TPU404", lambda x: x * DRAWS.random()),
        ("TPU404", lambda x: x * DRAWN.random()),
    ],
)
def test_what_each_call_takes_from_a_global_is_refused(code: str, read: Any):
    state = DRAWS.getstate(), DRAWN.bit_generator.state
    with pytest.raises(PortError) as raised:
        tpuport.convert(read, verify=False)(torch.ones(2))
    assert raised.value.code == code
    assert state == (DRAWS.getstate(), DRAWN.bit_generator.state)
    assert repr(STEPS) == "count(0)"


def test_an_iterator_in_a_closure_is_refused_and_kept():
    steps = iter([1.0, 2.0])
    with pytest.raises(PortError, match="iterator"):
        tpuport.convert(lambda x: x * next(steps), verify=False)(torch.ones(2))
    assert list(steps) == [1.0, 2.0]


class Block(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * float(os.environ.get("TPUPORT_" + "TEST_" + "GAIN", "1"))


def test_under_porting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TPUPORT_TEST_GAIN", raising=False)
    with tpuport.porting(verify=False) as run:
        net, x = Block(2, 2).cuda(), torch.ones(1, 2).cuda()
        first = net(x).detach().cpu()
        monkeypatch.setenv("TPUPORT_TEST_GAIN", "3")
        torch.testing.assert_close(net(x).detach().cpu(), first * 3)
    assert run.report.programs
