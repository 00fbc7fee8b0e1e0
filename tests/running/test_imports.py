"""Modules are rewritten as they are imported, look like the user's own, and leave no trace."""

import bdb
import importlib
import importlib.resources
import importlib.util
import inspect
import pickle
import runpy
import sys
import textwrap
import threading
import traceback
import types
import warnings
import zipfile
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

import pytest
import torch

import tpuport
from tpuport.compat.imports.import_hook import RewrittenLoader, hook, loader_for
from tpuport.foundation.errors import UsageError

MODEL = '''
"""A model."""
import torch


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor):
        if x.sum() > 0:
            x = -x  # turned
        kept = x[mask > 0]
        self.where = "here"
        return kept.sum()


def fails(x: torch.Tensor):
    y = x.type_as(x)
    raise ValueError("wrong")
'''
DEVICE = """
import torch


def forward(x):
    return x.cuda() + torch.zeros(3, device="cuda")
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """A package; every module of it that is still there after the test is a trace."""
    root = tmp_path / "code"
    files = {
        "pack/__init__.py": "from .model import Net\nfrom . import plain\n",
        "pack/model.py": MODEL,
        "pack/plain.py": "VALUE = 1\n",
        "pack/device.py": DEVICE,
        "pack/data.txt": "hello",
        "pack/__main__.py": MODEL + "\nprint(__name__, __spec__.name)\n",
        "spaced/inner.py": MODEL,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.syspath_prepend(root)
    yield root / "pack"
    left = [name for name in sys.modules if name.partition(".")[0] in {"pack", "spaced"}]
    for name in left:
        del sys.modules[name]


def imported(name: str) -> types.ModuleType:
    importlib.invalidate_caches()
    return importlib.import_module(name)


def is_rewritten(module: types.ModuleType) -> bool:
    return "tpuport" in vars(module)


@pytest.mark.usefixtures("pack")
def test_a_named_package_is_rewritten_and_forgotten():
    finders, before = list(sys.meta_path), set(sys.modules)
    with hook(["pack"]) as found:
        package = imported("pack")
        assert is_rewritten(package.model)
        assert isinstance(package.model.__loader__, RewrittenLoader)
        assert type(package.plain.__loader__) is SourceFileLoader
        assert package.Net is package.model.Net
    assert sys.meta_path == finders
    assert not [n for n in set(sys.modules) - before if n.partition(".")[0] == "pack"]
    assert not is_rewritten(imported("pack").model)
    (model,) = [one for one in found.modules if one.name == "pack.model"]
    assert {("TPU101", 8), ("TPU210", 10), ("TPU420", 16)} <= set(model.applied)
    assert model.file.endswith("pack/model.py")
    assert [one.name for one in found.modules] == ["pack", "pack.model", "pack.plain"]


class _Watching:
    """A finder of the user's that notes what is executed, as hooks of `wrapt` and coverage do."""

    def __init__(self):
        self.noted = []

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] != "pack":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self.noted.append((module.__name__, is_rewritten(module)))

        spec.loader.exec_module = exec_module
        return spec


@pytest.mark.usefixtures("pack")
def test_what_another_finder_has_set_on_a_loader_stays(monkeypatch):
    other = _Watching()
    monkeypatch.setattr(sys, "meta_path", [other, *sys.meta_path])
    with hook(["pack"]):
        model = imported("pack").model
        assert isinstance(model.__loader__, RewrittenLoader)
        assert "kept" in inspect.getsource(model)
    noted = [("pack.model", True), ("pack.plain", False), ("pack", False)]
    assert other.noted == noted
    assert not is_rewritten(imported("pack").model)
    assert other.noted[3] == ("pack.model", False)


def test_results_are_those_of_the_original(pack):
    x, mask = torch.randn(4, 3), torch.tensor([[1], [0], [1], [1]]).expand(4, 3)
    expected = imported("pack").Net()(x, mask), imported("pack").Net()(-x, mask)
    for name in [n for n in sys.modules if n.partition(".")[0] == "pack"]:
        del sys.modules[name]
    with hook(["pack"]):
        net = imported("pack").Net()
        assert all(map(torch.equal, expected, (net(x, mask), net(-x, mask))))
    del pack


@pytest.mark.usefixtures("pack")
def test_calls_about_cuda_are_left_to_the_shims():
    with hook(["pack"]) as found:
        assert not is_rewritten(imported("pack.device"))
    assert not [one for one in found.modules if one.applied and one.name == "pack.device"]


def test_a_path_covers_what_is_below_it_but_not_what_is_installed_there(pack, monkeypatch):
    installed = pack.parent / "venv" / "lib" / "site-packages"
    (installed / "pack_installed").mkdir(parents=True)
    (installed / "pack_installed" / "__init__.py").write_text(MODEL)
    monkeypatch.syspath_prepend(installed)
    with hook(paths=[pack.parent]) as found:
        assert is_rewritten(imported("pack").model)
        assert not is_rewritten(imported("pack_installed"))
        import graphlib  # noqa: F401
    del sys.modules["pack_installed"]
    assert {one.name.partition(".")[0] for one in found.modules} == {"pack"}
    with hook(["pack_installed"]):
        assert is_rewritten(imported("pack_installed"))
    with hook(paths=[installed / "pack_installed"]):
        assert is_rewritten(imported("pack_installed"))
    assert "pack_installed" not in sys.modules


def test_one_file_can_be_a_path(pack):
    with hook(paths=[pack / "model.py"]) as found:
        assert is_rewritten(imported("pack").model)
    assert [one.name for one in found.modules] == ["pack.model"]
    assert not hasattr(sys.modules["pack"], "model")  # the package came by itself, as it is
    assert "pack.model" not in sys.modules


@pytest.mark.usefixtures("pack")
def test_a_namespace_package_is_forgotten_too():
    with hook(["spaced"]):
        assert is_rewritten(imported("spaced.inner"))
    assert not [name for name in sys.modules if name.startswith("spaced")]


def test_a_package_in_an_archive_is_left_alone(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "pack_zip.zip", "w") as archive:
        archive.writestr("pack_zipped/__init__.py", MODEL)
    monkeypatch.syspath_prepend(tmp_path / "pack_zip.zip")
    with hook(["pack_zipped"]) as found:
        assert not is_rewritten(imported("pack_zipped"))
    assert found.modules == []
    del sys.modules["pack_zipped"]


@pytest.mark.usefixtures("pack")
def test_a_package_that_is_there_already_is_an_error():
    imported("pack.plain")
    with (
        pytest.raises(UsageError, match=r"pack was imported before .* inside the block"),
        tpuport.porting("pack"),
    ):
        pass
    with pytest.raises(UsageError, match=r"pack.plain was imported before"), hook(["pack.plain"]):
        pass
    del sys.modules["pack.model"]
    with hook(["pack.model"]):
        assert is_rewritten(imported("pack.model"))


@pytest.mark.parametrize("name", ["./pack", "pack.py/", "", "pack-age"])
def test_a_package_has_an_import_name(name: str):
    with pytest.raises(UsageError, match='such as "navsim", got'), hook([name]):
        pass


def test_what_cannot_be_rewritten_is_said(tmp_path):
    with pytest.raises(UsageError, match="Expected a file or folder"), hook(paths=[tmp_path / "x"]):
        pass
    with pytest.raises(UsageError, match="tpuport itself"), hook(["tpuport.ops"]):
        pass


def test_a_path_leaves_what_is_there_already(pack):
    model = imported("pack.model")
    with hook(paths=[pack]) as found:
        assert imported("pack.model") is model
        assert not is_rewritten(importlib.reload(model))
        assert is_rewritten(imported("pack.__main__"))
    assert sys.modules["pack.model"] is model
    assert [one.name for one in found.modules] == ["pack.__main__"]


@pytest.mark.usefixtures("pack")
def test_blocks_inside_each_other_keep_their_own():
    with hook(["pack"]):
        model = imported("pack.model")
        with hook(["pack", "spaced"]) as inner:
            assert imported("pack.model") is model
            both = imported("pack.device")
            assert is_rewritten(imported("spaced.inner"))
        assert [one.name for one in inner.modules] == ["pack.device", "spaced.inner"]
        assert imported("pack.model") is model
        # The outer block has rewritten it, too: a second copy would be another one.
        assert imported("pack.device") is both
        assert "spaced.inner" not in sys.modules
    assert not [name for name in sys.modules if name.partition(".")[0] == "pack"]


def test_blocks_in_two_threads_share_what_both_cover(pack):
    entered, leave = threading.Barrier(2), threading.Event()

    def other() -> None:
        with hook(paths=[pack]):
            entered.wait()
            leave.wait()

    thread = threading.Thread(target=other)
    with hook(["pack"]):
        thread.start()
        entered.wait()
        model = imported("pack.model")
    assert sys.modules["pack.model"] is model
    leave.set()
    thread.join()
    assert not [name for name in sys.modules if name.split(".")[0] == "pack"]


@pytest.mark.usefixtures("pack")
def test_a_failing_block_leaves_nothing():
    finders = list(sys.meta_path)
    with pytest.raises(AttributeError, match="nothing"), tpuport.porting("pack"):
        _ = imported("pack").nothing
    assert sys.meta_path == finders
    assert "pack" not in sys.modules


# What the user sees.


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(MODEL.splitlines(), 1) if text in line)


def test_a_traceback_shows_the_users_line(pack):
    with hook(["pack"]):
        model = imported("pack.model")
        with pytest.raises(ValueError, match="wrong") as caught:
            model.fails(torch.ones(2))
    last = traceback.extract_tb(caught.tb)[-1]
    assert (last.filename, last.lineno) == (str(pack / "model.py"), line_of("raise"))
    assert last.line == 'raise ValueError("wrong")'


def test_source_and_places_are_the_users(pack):
    with hook(["pack"]):
        model = imported("pack.model")
        forward = inspect.getsource(model.Net.forward)
        assert forward.splitlines() == MODEL.splitlines()[line_of("def forward") - 1 :][:6]
        assert "tpuport" not in inspect.getsource(model)
        assert model.Net.forward.__code__.co_firstlineno == line_of("def forward")
        assert model.__file__ == model.__spec__.origin == str(pack / "model.py")
        assert model.__spec__.loader is model.__loader__
        assert model.__loader__.get_source("pack.model") == MODEL
        assert model.__doc__ == "A model."
        assert model.__package__ == "pack"


def test_a_breakpoint_by_line_is_hit(pack):
    hit = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame):
            if self.break_here(frame):
                hit.append((frame.f_lineno, frame.f_locals["x"].shape))

    with hook(["pack"]):
        net = imported("pack").Net()
        debugger = Debugger()
        for text in ("# turned", "self.where"):
            assert debugger.set_break(str(pack / "model.py"), line_of(text)) is None
        debugger.runcall(net, torch.ones(2, 2), torch.ones(2, 2))
    assert {line for line, _ in hit} == {line_of("# turned"), line_of("self.where")}


def test_a_syntax_error_is_the_compilers(pack):
    folder = pack
    (folder / "broken.py").write_text("x = 1\ndef f(:\n")
    with hook(["pack"]) as found, pytest.raises(SyntaxError) as caught:
        import pack.broken  # pyright: ignore
    assert (caught.value.filename, caught.value.lineno) == (str(pack / "broken.py"), 2)
    assert len(traceback.extract_tb(caught.tb)) == 1
    assert found.modules[-1].reason.startswith("no Python")


def test_what_the_rules_cannot_read_is_imported_as_it_is(pack, monkeypatch):
    def fail(self, text):
        raise KeyError("a bug")

    monkeypatch.setattr("tpuport.source.rewrite.rewriter.Session.run", fail)
    with hook(["pack"]) as found:
        assert not is_rewritten(imported("pack").model)
    assert "internal error, KeyError" in found.modules[0].reason
    assert not list((pack.parent.parent / "cache").rglob("*.json"))


def test_an_invalid_escape_is_no_new_warning(pack):
    (pack / "escaped.py").write_text(MODEL.replace('"wrong"', r'"\d"'))
    with warnings.catch_warnings(record=True) as seen, hook(["pack"]):
        warnings.simplefilter("always")
        assert is_rewritten(imported("pack.escaped"))
    assert len(seen) <= 1


# What Python does with modules.


@pytest.mark.usefixtures("pack")
def test_reload_pickle_and_resources_work():
    with hook(["pack"]):
        model = imported("pack.model")
        assert is_rewritten(importlib.reload(model))
        net = pickle.loads(pickle.dumps(model.Net()))
        assert type(net) is model.Net
        data = importlib.resources.files("pack") / "data.txt"
        assert data.read_text() == "hello"
        assert importlib.util.find_spec("pack.model") is model.__spec__


def test_reload_reads_the_changed_file(pack):
    with hook(["pack"]) as found:
        model = imported("pack.model")
        (pack / "model.py").write_text("\n" + MODEL + "NEW = 1\n")
        assert importlib.reload(model).NEW == 1
    assert ("TPU101", 9) in found.modules[-1].applied


@pytest.mark.usefixtures("pack")
def test_a_module_runs_as_main(capsys):
    with hook(["pack"]):
        names = runpy.run_module("pack", run_name="__main__", alter_sys=True)
    assert capsys.readouterr().out == "__main__ pack.__main__\n"
    assert "tpuport" in names


def test_a_script_has_the_loader_of_the_hook(pack):
    with hook(paths=[pack]):
        assert isinstance(loader_for("__main__", str(pack / "model.py")), RewrittenLoader)
        assert type(loader_for("__main__", __file__)) is SourceFileLoader
    assert type(loader_for("__main__", str(pack / "model.py"))) is SourceFileLoader


@pytest.mark.usefixtures("pack")
def test_threads_may_import_at_once():
    start, seen = threading.Barrier(3), []

    def work(name: str) -> None:
        start.wait()
        seen.append(importlib.import_module(name))

    importlib.invalidate_caches()  # which threads may not do at once
    with hook(["pack", "spaced"]):
        # Not "pack" beside "pack.model": Python itself takes that for a deadlock now and then.
        names = ["pack.model", "pack.model", "spaced.inner"]
        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(is_rewritten(module) for module in seen) == 3
        assert len({id(module) for module in seen if module.__name__ == "pack.model"}) == 1


# What is kept on disk.


def kept(root: Path) -> list[Path]:
    return sorted((root / "cache").rglob("*.json"))


def runs_of_the_rules(monkeypatch) -> list[str]:
    from tpuport.source.rewrite.rewriter import Session

    runs, run = [], Session.run

    def counted(self, text):
        runs.append(self.file)
        return run(self, text)

    monkeypatch.setattr(Session, "run", counted)
    return runs


def test_the_second_import_reads_what_the_first_has_kept(pack, monkeypatch):
    runs = runs_of_the_rules(monkeypatch)
    for expected in (3, 3):
        with hook(["pack"]) as found:
            assert is_rewritten(imported("pack").model)
        assert len(runs) == expected
        assert found.modules[1].applied
    (pack / "model.py").write_text(MODEL + "# changed\n")
    with hook(["pack"]):
        imported("pack")
    assert len(runs) == 4


@pytest.mark.parametrize("damage", [lambda data: data[:40], lambda data: data[:-9] + b"x" * 9])
def test_a_damaged_entry_is_made_again(pack, tmp_path, monkeypatch, damage):
    with hook(["pack"]):
        imported("pack")
    entries = kept(tmp_path)
    assert len(entries) == 3
    before = [path.read_bytes() for path in entries]
    for path in entries:
        path.write_bytes(damage(path.read_bytes()))
    runs = runs_of_the_rules(monkeypatch)
    with hook(["pack"]):
        assert is_rewritten(imported("pack").model)
    assert len(runs) == 3
    assert [path.read_bytes() for path in entries] == before
    del pack


def test_python_keeps_no_rewritten_bytecode(pack, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    with hook(["pack"]):
        imported("pack")
    cached = {path.name.partition(".")[0] for path in (pack / "__pycache__").glob("*.pyc")}
    assert cached == {"__init__", "plain"}


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path, pack):
    (tmp_path / "cache").write_text("a file")
    with hook(["pack"]):
        assert is_rewritten(imported("pack").model)
    del pack


def test_another_file_with_the_same_content_is_itself(pack):
    (pack / "twin.py").write_text(textwrap.dedent(MODEL))
    with hook(["pack"]):
        codes = [imported(f"pack.{name}").fails.__code__ for name in ("model", "twin")]
    assert [Path(code.co_filename).name for code in codes] == ["model.py", "twin.py"]


# What a trace makes of it.

PARTLY = """
import torch
from .other import largest


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        if x.sum() > 0:
            x = -x
        y = largest(x)
        while y > 3:
            x = x * 0.5
            y = largest(x)
        return x.type_as(x)
"""


def test_a_trace_goes_on_from_the_rewritten_code(pack):
    (pack / "other.py").write_text("def largest(x):\n    return x.max()\n")
    (pack / "partly.py").write_text(PARTLY)
    x = torch.tensor([9.0, -90.0, 1.0])
    expected = imported("pack.partly").Net()(x)
    for name in [n for n in sys.modules if n.partition(".")[0] == "pack"]:
        del sys.modules[name]
    for _ in "cold", "warm":
        with hook(["pack"]) as found:
            ported = tpuport.convert(imported("pack.partly").Net())
            assert torch.equal(tpuport.to_torch(ported(x)), expected)
        (partly,) = [one for one in found.modules if one.name == "pack.partly"]
        assert partly.applied == (("TPU101", 8), ("TPU420", 14))
        (rewrite,) = ported.report.rewrites
        assert (rewrite.code, rewrite.line) == ("TPU104", 11)
        assert rewrite.file == str(pack / "partly.py")
