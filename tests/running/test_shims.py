"""Shims are put in force and taken back, however the blocks overlap."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import safetensors
import torch
import torch.nn.attention.flex_attention
import torch.utils.checkpoint

import tpuport
import tpuport.compat.shims
from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching import shim as _shim
from tpuport.foundation.patching.copies import COPIES
from tpuport.foundation.patching.shim import REPLACED, Replacement, find_shims, installed
from tpuport.tracing import patches
from tpuport.tracing.patches.flex_attention import FlexAttention


def before(*_: object) -> str:
    return "before"


def test_blocks_that_overlap_in_any_order_leave_the_identical_object():
    owner = SimpleNamespace(call=before)
    first, second = object(), object()
    REPLACED.add(first, [Replacement(owner, "call", "one")])
    REPLACED.add(second, [Replacement(owner, "call", "two")])
    REPLACED.remove(first)
    assert owner.call == "two"
    REPLACED.remove(second)
    assert owner.call is before


def test_an_inherited_attribute_is_not_copied_down():
    class Base:
        call = before

    class Derived(Base):
        pass

    token = object()
    REPLACED.add(token, [Replacement(Derived, "call", "ours")])
    assert Derived.call == "ours"
    REPLACED.remove(token)
    assert "call" not in vars(Derived)
    assert Derived.call is before


def everything_replaced() -> list[tuple[object, str, object]]:
    found = []
    for package in (patches, tpuport.compat.shims):
        for shim in find_shims(package):
            if shim.MODULE in sys.modules:
                found += [
                    (item.owner, item.name, vars(item.owner).get(item.name))
                    for item in shim().replacements()
                ]
    return found


def test_every_patched_object_is_the_identical_object_afterwards():
    held = everything_replaced()
    modules, path, finders = dict(sys.modules), list(sys.path), list(sys.meta_path)
    with tpuport.porting(), tpuport.porting():
        pass
    assert all(vars(owner).get(name) is value for owner, name, value in held)
    assert (sys.path, sys.meta_path) == (path, finders)
    assert {n: m for n, m in sys.modules.items() if n in modules} == modules


def test_an_error_in_the_block_leaves_nothing_either():
    held = everything_replaced()
    with pytest.raises(ZeroDivisionError), tpuport.porting():
        raise ZeroDivisionError
    assert all(vars(owner).get(name) is value for owner, name, value in held)
    assert active() is None


def test_a_thread_works_in_the_context_that_it_was_started_in():
    seen = []
    with tpuport.porting(absent=("a",)):
        thread = threading.Thread(target=lambda: seen.append(active()))
        thread.start()
        thread.join()
        assert seen == [active()]
        with tpuport.porting(absent=("b",), cuda_version="12.4"):
            assert active().absent == ("a", "b")
            assert active().options == {"cuda_version": "12.4"}
        assert active().absent == ("a",)
        assert active().options == {}


def test_parallel_contexts_leave_in_any_order():
    held = everything_replaced()
    entered, leave, seen = threading.Barrier(2), threading.Event(), []
    begin = threading.Event()

    def other() -> None:
        begin.wait()
        with tpuport.porting(absent=("b",)):
            entered.wait()
            leave.wait()
            seen.append(active().absent)

    thread = threading.Thread(target=other)
    thread.start()
    with tpuport.porting(absent=("a",)):
        begin.set()
        entered.wait()
        assert active().absent == ("a",)
    leave.set()
    thread.join()
    assert seen == [("b",)]
    assert all(vars(owner).get(name) is value for owner, name, value in held)


@pytest.mark.parametrize("shim", [*find_shims(patches), *find_shims(tpuport.compat.shims)])
def test_a_shim_says_what_it_replaces_and_why(shim: type[_shim.Shim]):
    assert shim.TARGET
    assert shim.REASON
    if shim in find_shims(tpuport.compat.shims):
        assert shim.REFERENCE


@pytest.fixture
def late_package(tmp_path, monkeypatch):
    (tmp_path / "late_pack").mkdir()
    (tmp_path / "late_pack" / "__init__.py").write_text("from late_pack import inner\n")
    (tmp_path / "late_pack" / "inner.py").write_text("def call():\n    return 'before'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [n for n in sys.modules if n.startswith("late_pack")]:
        del sys.modules[name]


@pytest.mark.usefixtures("late_package")
def test_a_package_that_is_imported_inside_the_block_is_shimmed(monkeypatch):
    class Late(_shim.Shim):
        TARGET, REASON, REFERENCE = "late_pack.inner.call", "a test", "late_pack.inner.call"
        MODULE = "late_pack.inner"

        def replacements(self):
            from late_pack import inner

            return [Replacement(inner, "call", lambda: "ours")]

    monkeypatch.setattr("tpuport.compat.porting.find_shims", lambda package: (Late,))
    with tpuport.porting():
        from late_pack import inner

        assert inner.call() == "ours"
        assert inner.__loader__ is inner.__spec__.loader
    assert inner.call() == "before"


def test_a_module_is_looked_through_again_only_if_its_names_changed(
    monkeypatch: pytest.MonkeyPatch,
):
    """It takes longest where much is imported; all copies are found nevertheless."""
    looked, look_for = [], COPIES.look_for
    monkeypatch.setattr(COPIES, "look_for", lambda given: looked.append(look_for(given)))
    copied = {
        "wait_for_all": torch.distributed.barrier,
        "sdpa_kernel": torch.nn.attention.sdpa_kernel,
        "flex": torch.nn.attention.flex_attention.flex_attention,
        "safe_open": safetensors.safe_open,
    }
    module = ModuleType("has_copies")
    vars(module).update(copied)
    monkeypatch.setitem(sys.modules, "has_copies", module)
    with tpuport.porting():
        assert [name for name, value in copied.items() if vars(module)[name] is value] == []
    assert {name: vars(module)[name] for name in copied} == copied
    module.late = torch.distributed.barrier
    with tpuport.porting():
        assert module.late is module.wait_for_all is torch.distributed.barrier
        assert module.late is not copied["wait_for_all"]
    assert {name: vars(module)[name] for name in copied} == copied
    assert looked[-1] < 10 < len(sys.modules)
    looked.clear()
    with tpuport.porting(), installed([FlexAttention]):  # as a trace in the block does
        assert module.flex is not copied["flex"]
    assert all(number < 10 for number in looked)
    assert {name: vars(module)[name] for name in copied} == copied
