"""What runs before somebody else's script: made-up files, refused writes, and the end of it all."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tpuport.repository import runs
from tpuport.repository.before import (
    SeenRun,
    make_images,
    make_numbers,
    make_text,
    stand_in_for_torchvision,
)
from tpuport.repository.copies import copy_repository
from tpuport.repository.logs import last_error

BEFORE = Path(runs.__file__).with_name("before.py")

HOSTILE = """
import builtins, gzip, os, shutil, socket, subprocess, sys, pathlib
import numpy as np

numbers = np.memmap("data/none.bin", dtype=np.uint16, mode="r")
again = np.memmap("data/none.bin", dtype=np.uint16, mode="r")
assert isinstance(numbers, np.memmap) and (numbers == again).all() and numbers.max() < 64
with gzip.open("none.gz") as file:
    assert file.read(10) == gzip.open("none.gz").read(10)
    assert len(file.read()) + 10 == len(gzip.open("none.gz", "rt").read())
assert len(gzip.open("large.gz").read(300_000)) == 300_000
assert np.fromfile("none.f32", dtype=np.float32, count=5).shape == (5,)
assert "O God, O God!".strip("God, !") == "" or set("O God") <= set(open("none.txt").read())
assert os.popen("stty size", "r").read().split() == ["24", "80"]
assert os.get_terminal_size().columns == 80 == shutil.get_terminal_size().columns
assert os.popen("echo 3").read() == "3\\n"
open("here.txt", "w").write("mine")
assert open("here.txt").read() == "mine"
try:
    open("none.json")
except FileNotFoundError:
    pass
subprocess.run([sys.executable, "-c", ""])
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
for change in (
    lambda: open(sys.argv[1], "w"),
    lambda: pathlib.Path(sys.argv[1]).unlink(),
    lambda: os.rename("here.txt", sys.argv[1]),
    lambda: os.mkdir(sys.argv[1] + ".d"),
):
    try:
        change()
    except PermissionError as error:
        assert "outside of its copy" in str(error)
    else:
        raise AssertionError("written")
"""


def run_script(folder: Path, script: str, *args: Any, **settings: Any) -> list[dict[str, str]]:
    """Run a script as `tpuport port` does, without torch, and return what was seen."""
    work = folder / "work"
    work.mkdir()
    (work / "before.py").write_text(BEFORE.read_text())
    found = {"writable": [str(folder)], "made_up": True, "autocast": True, "quiet": True}
    found |= {"workers": True, "batches": []}
    (work / "before.json").write_text(json.dumps(found | settings))
    code = "import runpy, sys\nbefore, folder = sys.argv.pop(1), sys.argv.pop(1)\n"
    code += "runpy.run_path(before, {'FOLDER': folder}, '__before__')\n"
    temporary = folder / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code + script, work / "before.py", work, *args],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(temporary), "WANDB_MODE": "disabled"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (work / "seen.jsonl").read_text().splitlines()]


def test_files_are_made_up_and_writes_outside_refused(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    seen = run_script(tmp_path / "repo", HOSTILE, outside)
    assert outside.read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "repo"]
    kinds = {
        kind: [one["what"] for one in seen if one["kind"] == kind]
        for kind in ("made up", "refused write")
    }
    assert kinds["made up"] == ["data/none.bin", "none.gz", "large.gz", "none.f32", "none.txt"]
    assert kinds["refused write"] == [str(outside), f"{outside}.d"]
    assert {"process", "connection", "terminal"} <= {one["kind"] for one in seen}


def test_nothing_is_made_up_unasked(tmp_path: Path) -> None:
    script = """
import numpy as np
try:
    np.memmap("none.bin", mode="r")
except FileNotFoundError:
    __import__("subprocess").run(["true"])
"""
    assert [one["kind"] for one in run_script(tmp_path, script, made_up=False)] == ["process"]


def test_made_up_files_are_the_same_each_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        seen = SeenRun(tmp_path / folder, [])
        (tmp_path / folder).mkdir()
        for name, make in (("x", make_numbers("int32", 9)), ("y", make_text)):
            assert Path(seen.made(name, make)).parent == tmp_path / folder / "made-up"
    first, second = (sorted((tmp_path / f / "made-up").iterdir()) for f in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert SeenRun(tmp_path, []).made(str(tmp_path / "a"), make_text) == str(tmp_path / "a")


def test_after_the_script_nothing_is_seen(tmp_path: Path) -> None:
    seen = SeenRun(tmp_path, [])
    seen.watch("os.system", (b"one",))
    seen.stop()
    seen.watch("os.system", (b"two",))
    seen.watch("os.mkdir", ("/outside", 0, -1))
    lines = (tmp_path / "seen.jsonl").read_text().splitlines()
    assert [json.loads(line)["what"] for line in lines] == ["one"]


def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    from tpuport.repository import before

    monkeypatch.setattr(before, "_IMAGE_SIZE", 4)
    make_images(tmp_path / "0a")
    files = sorted((tmp_path / "0a").rglob("*.png"))
    assert len(files) == 80
    assert np.asarray(image.open(files[0])).shape == (4, 4, 3)


def test_data_sets_of_torchvision_are_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in has what counts of torchvision: `MNIST.class_to_idx` has no setter."""

    class VisionDataset:
        def __init__(self, root: str, **transforms: Any) -> None:
            self.root = root

    class CIFAR10(VisionDataset):
        def __init__(self, root: str, train: bool = True, **more: Any) -> None:
            raise RuntimeError("Dataset not found")

    class MNIST(CIFAR10):
        classes = ("zero",) * 10
        class_to_idx = property(lambda self: {name: n for n, name in enumerate(self.classes)})

    made = {"VisionDataset": VisionDataset, "CIFAR10": CIFAR10, "MNIST": MNIST}
    others = {name: type(name, (MNIST,), {}) for name in ("CIFAR100", "FashionMNIST")}
    datasets = SimpleNamespace(**made, **others, DatasetFolder=type("Folder", (MNIST,), {}))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(datasets=datasets))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)
    stand_in_for_torchvision(SeenRun(tmp_path, []))
    for kind, shape in ((CIFAR10, (512, 32, 32, 3)), (MNIST, (512, 28, 28))):
        found: Any = kind("../data", train=False, download=True)
        assert found.data.shape == shape
        assert found.class_to_idx["3"] == 3


def test_nothing_is_imported_before_the_script_does(tmp_path: Path) -> None:
    """Importing a package may fail, and takes time, where the script needs a part of it only."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    names = ("VisionDataset", "DatasetFolder", "CIFAR10", "CIFAR100", "MNIST", "FashionMNIST")
    text = "".join(f"class {name}:\n    def __init__(self): raise OSError\n" for name in names)
    (package / "datasets.py").write_text(text)
    (tmp_path / "wandb.py").write_text("def init(name, mode='online'): return name, mode")
    script = """
assert not {"torch", "torchvision", "diffusers", "wandb"} & set(sys.modules)
sys.path.insert(0, ".")
import torchvision, wandb
assert wandb.init("a", mode="online") == ("a", "disabled")
from torchvision.datasets import DatasetFolder
assert torchvision.datasets.DatasetFolder is DatasetFolder
assert hasattr(DatasetFolder.__init__, "__wrapped__")
open("none.txt")
"""
    assert [one["kind"] for one in run_script(tmp_path, script)] == ["made up"]


def test_data_is_loaded_without_processes(tmp_path: Path) -> None:
    """In a process of its own: it changes torch."""
    script = """
from torch.utils.data import DataLoader
data = list(range(6))
for loader in (
    DataLoader(data, 2, num_workers=3, prefetch_factor=2, persistent_workers=True, timeout=9),
    DataLoader(data, 2, False, None, None, 3),
    DataLoader(data, batch_size=2, num_workers=0),
    DataLoader(data, 2),
):
    assert loader.num_workers == 0 and [len(batch) for batch in loader] == [2, 2, 2]
"""
    seen = run_script(tmp_path, script, workers=False)
    assert [one["kind"] for one in seen] == ["workers"]


def test_batches_are_smaller(tmp_path: Path) -> None:
    """In a process of its own: it changes torch."""
    script = """
from torch.utils.data import DataLoader
data = list(range(6))
for loader, sizes in (
    (DataLoader(data, 5), [4, 2]),
    (DataLoader(data, batch_size=5, num_workers=2, drop_last=True), [4]),
    (DataLoader(data, 6), [6]),
    (DataLoader(data, 2, True), [2, 2, 2]),
    (DataLoader(data), [1] * 6),
):
    assert [len(batch) for batch in loader] == sizes
"""
    seen = run_script(tmp_path, script, workers=False, batches=[2, 5])
    assert [one for one in seen if one["kind"] == "batches"] == [
        {"kind": "batches", "what": "5", "instead": "4"}
    ]


def test_what_is_changed_has_the_arguments_that_it_had(tmp_path: Path) -> None:
    """Lightning makes loaders anew from the signature: batches had one row, and no collate_fn."""
    script = """
import inspect
from torch.utils.data import DataLoader
data = list(range(6))
first = DataLoader(data, batch_size=5, num_workers=2, collate_fn=tuple)
names = inspect.signature(DataLoader.__init__).parameters
assert not any(one.kind is one.VAR_KEYWORD for one in names.values())
held = {name: vars(first)[name] for name in names if name in vars(first)}
assert {"dataset", "batch_size", "collate_fn", "num_workers"} <= held.keys()
again = DataLoader(**{**held, "sampler": None, "batch_sampler": None})
assert list(again) == [(0, 1, 2, 3), (4, 5)]
import gzip, os, numpy, torch
for changed in (open, gzip.open, os.popen, torch.save, torch.autocast.__init__):
    kinds = [one.kind for one in inspect.signature(changed).parameters.values()]
    assert inspect.Parameter.VAR_POSITIONAL not in kinds, changed
"""
    # The script's own asserts end it with an error; all its loaders were those that are changed.
    seen = run_script(tmp_path, script, workers=False, batches=[5], autocast=False)
    assert {one["what"] for one in seen if one["kind"] == "batches"} == {"5"}


def test_autocast_is_off(tmp_path: Path) -> None:
    """In a process of its own: it changes torch."""
    script = """
import torch
for make in (lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.amp.autocast("cpu"),
             lambda: torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=True)):
    with make():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
with torch.autocast("cpu", enabled=False):
    pass
"""
    seen = run_script(tmp_path, script, autocast=False)
    found = [one["what"] for one in seen if one["kind"] == "autocast off"]
    assert found == ["autocast of cpu"]


def test_a_copy_has_no_way_back(tmp_path: Path) -> None:
    root, copy = tmp_path / "repo", tmp_path / "repo" / "out" / "copy"
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "sub" / "a.py").write_text("1")
    (tmp_path / "beside").write_text("2")
    (root / "sub" / "link").symlink_to("../../beside")
    copy.parent.mkdir()
    for _ in range(2):
        copy_repository(root, copy, without=root / "out")
        assert sorted(p.relative_to(copy).as_posix() for p in copy.rglob("*")) == [
            *("sub", "sub/a.py", "sub/link")
        ]
        assert (copy / "sub" / "link").read_text() == "2"
        (copy / "sub" / "a.py").write_text("changed")
    assert (root / "sub" / "a.py").read_text() == "1"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find strays")
def test_a_killed_call_leaves_nothing_running(tmp_path: Path) -> None:
    child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"""
        import sys
        from pathlib import Path
        from tpuport.repository import processes
        processes._TPUPORT = (sys.executable, "-c", {child!r})
        here = Path(sys.argv[1])
        processes.run_command([str(here / "pid")], folder=here, log=here / "log", seconds=600)
        """
    call = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), tmp_path])
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    temporary = next(
        value.partition(b"=")[2].decode()
        for value in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if value.startswith(b"TMPDIR=")
    )
    call.kill()
    call.wait()
    while _runs(pid) or Path(temporary).exists():
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


def test_the_last_error_of_a_log() -> None:
    log = textwrap.dedent("""
        Traceback (most recent call last):
          File "train.py", line 3, in <module>
            main()
          File "lib/net.py", line 7, in main
            assert False, "no"
        AssertionError: no
        some more
        """)
    assert last_error(log) == "AssertionError: no (lib/net.py:7)."
    assert last_error("train.py: error: the following arguments are required: --lr") == (
        "train.py: error: the following arguments are required: --lr."
    )
    assert last_error("nothing") == ""
