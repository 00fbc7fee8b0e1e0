"""Packages that are not there: their import is satisfied where code cannot do without, no more."""

import copy
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import sys
import typing

import pytest

import tpuport
from tpuport.foundation.errors import PortError


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Import a module of the user's, written here, inside a porting block."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write_and_import(source: str, name: str = "user_code"):
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield write_and_import
    for name in set(sys.modules) - before:
        if name.startswith(("user_", "real_pack")):
            del sys.modules[name]


@pytest.fixture
def absent():
    with tpuport.porting(absent=("decord", "nuplan.common", "pytorch_lightning")):
        yield


DEFINITIONS = """
import enum
from dataclasses import dataclass
from typing import Optional, Union

import decord
import decord.bridge.torch as bridge
import torch
import pytorch_lightning as pl
from nuplan.common.state import EgoState, Kind, LookupError_, NoMapError
from deepspeed.ops.adam import FusedAdam

decord.bridge.set_bridge("torch")
LOGGER = pl.get_logger("name")
DEFAULT = pl.Config(width=3)

@dataclass
class Sample:
    state: Optional[EgoState] = None
    either: EgoState | None = None
    kind: Kind = Kind.FIRST
    config: Union[pl.Config, int] = pl.Config(width=3)

class Module(pl.LightningModule, torch.nn.Module, flag=1):
    pass

class Generic(pl.Base[int]):
    pass

class OwnError(NoMapError):
    pass

@pl.register("name")
class Registered:
    answer = 42

def function(a: EgoState, b: "EgoState" = Kind.SECOND, *c: list[EgoState]) -> dict[str, EgoState]:
    try:
        raise ValueError
    except NoMapError:
        return "wrong"
    except ValueError:
        return isinstance(a, EgoState), issubclass(int, EgoState), isinstance(a, (int, EgoState))

def work():
    return FusedAdam([1])

def look():
    return EgoState(1)
"""


@pytest.mark.usefixtures("absent")
def test_definitions_that_name_absent_packages(run):
    code = run(DEFINITIONS)
    assert code.function(1.0) == (False, False, False)
    assert code.Registered().answer == 42
    assert typing.get_type_hints(code.Sample)["kind"] is code.Kind
    sample = code.Sample(kind=3)
    assert dataclasses.replace(sample).kind == 3
    assert copy.deepcopy(code.Sample()).kind is code.Kind.FIRST
    assert issubclass(code.OwnError, Exception)
    with pytest.raises(code.OwnError):
        raise code.OwnError
    assert repr(code.EgoState) == (
        "<stand-in for nuplan.common.state.EgoState, which is not installed>"
    )


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda c: c.work(), r"user_code.py:46: deepspeed.ops.adam.FusedAdam was called"),
        (lambda c: c.look(), r"user_code.py:49: nuplan.common.state.EgoState was called"),
        (lambda c: c.Module(), r"LightningModule is the base of Module, of which an object"),
        (lambda c: c.LOGGER.info("x"), r"pytorch_lightning.get_logger\(\).info was called"),
        (lambda c: c.DEFAULT.width + 1, r"Config\(\).width was used \(__add__\)"),
        (lambda c: bool(c.DEFAULT), r"was used \(__bool__\)"),
        (lambda c: list(c.DEFAULT), r"was used \(__iter__\)"),
        (lambda c: c.DEFAULT[0], "was indexed"),
        (lambda c: c.DEFAULT == 3, "was compared"),
        (lambda c: c.DEFAULT | 3, "was used in a computation"),
        (lambda c: float(c.Kind.FIRST), r"Kind.FIRST was used \(__float__\)"),
    ],
)
def test_real_work_is_refused_at_the_users_line(run, work, message):
    code = run(DEFINITIONS)
    with pytest.raises(PortError, match=message) as caught:
        work(code)
    assert "is not installed" in str(caught.value)
    assert "What to do:" in str(caught.value)


@pytest.mark.usefixtures("absent")
def test_what_to_do_says_install_only_where_that_can_work(run):
    code = run(DEFINITIONS)
    with pytest.raises(PortError, match="What to do: pip install nuplan, or keep"):
        code.look()
    with pytest.raises(PortError, match="What to do: keep the program from"):
        code.work()


@pytest.mark.usefixtures("absent")
def test_a_decorated_function_stays_as_it_is_and_says_so(run):
    source = "import pytorch_lightning as pl\n@pl.rank_zero_only\ndef f():\n    return 3\n"
    with pytest.warns(UserWarning, match=r"user_code\.f is left undecorated: pytorch_lightning"):
        code = run(source)
    assert code.f() == 3


@pytest.mark.usefixtures("absent")
def test_a_kernel_is_not_the_function_that_it_was_written_as(run):
    code = run(
        "import triton\nimport triton.language as tl\n"
        "@triton.autotune(configs=[triton.Config({'B': 1})], key=['n'])\n"
        "@triton.jit\ndef kernel(x, B: tl.constexpr):\n    return x\n"
        "def launch():\n    return kernel[(1,)](3)\n"
    )
    with pytest.raises(PortError, match=r"user_code\.py:8: triton\.jit\(kernel\) was indexed"):
        code.launch()


@pytest.mark.usefixtures("absent")
def test_what_a_definition_calls_is_part_of_it(run):
    code = run(
        "import triton\nimport triton.language as tl\nfrom triton import Config\n"
        "from packaging import version\n"
        "NEW = version.parse(triton.__version__) >= version.parse('3.0.0')\n"
        "sizes = [Config({'B': b}, num_warps=8) for b in (16, 32) for _ in range(2)]\n"
        "def more():\n    return [triton.Config({'B': b}) for b in (16, 32)]\n"
        "LIMIT = tl.constexpr(3)\n"
        "@triton.autotune(configs=sizes + more(), key=['n'])\n"
        "@triton.heuristics({'EVEN': lambda args: triton.next_power_of_2(args['n'])})\n"
        "@triton.jit\n"
        "def kernel(x, n, B: tl.constexpr, EVEN: tl.constexpr = LIMIT):\n    return x\n"
        "def launch():\n    return kernel[lambda meta: (triton.cdiv(3, meta['B']),)](3)\n"
        "def work():\n    return [triton.cdiv(n, 2) for n in (1, 2)]\n"
    )
    assert len(code.sizes) == 4
    assert code.NEW is True
    with pytest.raises(PortError, match=r"user_code\.py:16: triton\.jit\(kernel\) was indexed"):
        code.launch()
    with pytest.raises(PortError, match=r"user_code\.py:18: triton\.cdiv was called"):
        code.work()


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize(
    "handler",
    [
        "try:\n    import deepspeed\n    HAS = True\nexcept ImportError:\n    HAS = False\n",
        "try:\n    from deepspeed.ops import x\n    HAS = True\nexcept:\n    HAS = False\n",
        "try:\n    import decord\n    HAS = True\n"
        "except (KeyError, ModuleNotFoundError) as e:\n    HAS = False\n",
        "import contextlib\nHAS = False\n"
        "with contextlib.suppress(ImportError):\n    import deepspeed\n    HAS = True\n",
        "import importlib.util\nHAS = importlib.util.find_spec('deepspeed') is not None\n",
        "from importlib import metadata\ntry:\n    metadata.version('deepspeed')\n    HAS = 1\n"
        "except metadata.PackageNotFoundError:\n    HAS = False\n",
    ],
)
@pytest.mark.parametrize("first", ["", "import deepspeed, decord\n"])
def test_code_that_copes_takes_its_own_branch(run, first, handler):
    assert run(first + handler).HAS is False


@pytest.mark.usefixtures("absent")
def test_a_module_that_is_imported_under_guard_is_absent_too(run, tmp_path):
    (tmp_path / "user_part.py").write_text("import deepspeed\n")
    code = run("try:\n    import user_part\n    HAS = True\nexcept ImportError:\n    HAS = False\n")
    assert code.HAS is False


@pytest.mark.usefixtures("absent")
def test_a_script_that_reports_any_failure_does_not_cope(run, tmp_path):
    (tmp_path / "user_part.py").write_text("import deepspeed\n")
    code = run("try:\n    import user_part\n    HAS = True\nexcept Exception:\n    HAS = False\n")
    assert code.HAS is True


@pytest.mark.usefixtures("absent")
def test_a_handler_that_raises_again_does_not_cope(run):
    code = run(
        "try:\n    import deepspeed\nexcept ImportError:\n    raise RuntimeError('install it')\n"
        "def f(x: deepspeed.Engine): ...\n"
    )
    assert code.f(1) is None


@pytest.mark.usefixtures("absent")
def test_a_star_import_is_refused(run):
    with pytest.raises(PortError, match=r"user_code\.py:1: decord was imported by `from"):
        run("from decord import *\n")


@pytest.mark.usefixtures("absent")
def test_a_package_that_is_installed_is_never_replaced(run, tmp_path):
    (tmp_path / "deepspeed.py").write_text("VALUE = 3\n")
    assert run("import deepspeed\n").deepspeed.VALUE == 3
    del sys.modules["deepspeed"]


@pytest.mark.usefixtures("absent")
def test_a_part_of_an_installed_package_may_be_missing(run, tmp_path, monkeypatch):
    (tmp_path / "real_pack").mkdir()
    (tmp_path / "real_pack" / "__init__.py").write_text("")
    with tpuport.porting(absent=("real_pack.cuda",)):
        code = run("import real_pack.cuda.ops\nfrom real_pack.cuda import kernel\n")
        with pytest.raises(PortError, match="was called"):
            code.kernel()
        with pytest.raises(ModuleNotFoundError, match=r"real_pack\.other"):
            run("import real_pack.other\n", "user_other")
        assert hasattr(code.real_pack, "cuda")
    with tpuport.porting():
        pass


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("name", ["real_pack_made", "decord"])
def test_a_finder_that_the_program_adds_is_asked(run, monkeypatch, where, name):
    source = f"""
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == {name!r} else None

    def exec_module(self, module):
        module.VALUE = 3

sys.meta_path.insert(0 if {where!r} == "first" else len(sys.meta_path), Finder())
import {name} as made
VALUE = made.VALUE
"""
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    assert run(source, "user_finder").VALUE == 3
    sys.modules.pop(name)


def test_other_packages_fail_with_a_note(run):
    with (
        tpuport.porting(),
        pytest.raises(ModuleNotFoundError, match="No module named 'decord'") as caught,
    ):
        run("import decord\n")
    assert "--absent decord" in caught.value.__notes__[0]
    with pytest.raises(ModuleNotFoundError) as caught:
        run("import deepspeed\n", "user_outside")
    assert not hasattr(caught.value, "__notes__")


def test_nothing_stays_behind(run):
    find_spec, imports = importlib.util.find_spec, __builtins__["__import__"]
    path, finders = list(sys.path), list(sys.meta_path)
    real = type(sys)("flash_attn")
    sys.modules["flash_attn"] = real
    try:
        with tpuport.porting(), tpuport.porting(absent=("decord",)):
            run("import deepspeed.ops, decord.bridge, flash_attn.bert_padding, xformers.ops\n")
            assert sys.modules["flash_attn"] is not real
        assert sys.modules["flash_attn"] is real
    finally:
        del sys.modules["flash_attn"]
    roots = {name.partition(".")[0] for name in sys.modules}
    assert not roots & {"deepspeed", "decord", "flash_attn", "xformers"}
    assert (sys.path[1:], sys.meta_path) == (path[1:], finders)
    assert importlib.util.find_spec is find_spec
    assert __builtins__["__import__"] is imports
