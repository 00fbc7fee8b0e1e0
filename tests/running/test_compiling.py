"""`torch.compile` and TorchScript inside a porting context: the function itself."""

import importlib.util
import sys

import pytest
import torch

import tpuport


@pytest.fixture(autouse=True)
def _porting():
    with tpuport.porting():
        yield


def double(x):
    return x * 2


def test_a_module_is_compiled_in_place_or_by_torchscript_to_itself():
    model = torch.nn.Linear(2, 2)
    model.compile(mode="reduce-overhead")
    assert model._compiled_call_impl is None
    assert torch.jit.script(model) is model
    assert torch.jit.trace(model, torch.ones(1, 2)) is model


def test_a_function_compiles_to_itself_in_every_form():
    assert torch.compile(double) is double
    assert torch.compile()(double) is double
    assert torch.compile(mode="default")(double) is double
    assert torch.compiler.compile(double) is double
    assert torch.compiler.disable(double) is double
    assert torch.compiler.disable(recursive=False)(double) is double
    assert torch.jit.script(double) is double
    assert torch.jit.trace(double, (torch.ones(1),), check_trace=False) is double
    assert torch.jit.ignore(double) is double
    assert torch.jit.unused(double) is double
    assert not torch.compiler.is_compiling()


def test_a_compiled_function_keeps_its_line():
    @torch.compile
    def fails(x):
        raise KeyError(x)

    with pytest.raises(KeyError, match="here"):
        fails("here")


SCRIPTED = """
import torch

@torch.jit.ignore
def warns(level: int = 0) -> None:
    del level

@torch.jit.script
class Scripted:
    def __init__(self, size: int):
        warns(2)
        self.size = size if torch.compiler.is_compiling() else size + 1
"""


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_classes_of_torch_are_scripted_with_the_names_around_them(tmp_path, monkeypatch):
    # As torch.distributed.optim scripts its classes, at a first import that may be in a context.
    path = tmp_path / "scripted.py"
    path.write_text(SCRIPTED)
    spec = importlib.util.spec_from_file_location("torch.scripted", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torch.scripted", module)
    spec.loader.exec_module(module)
    assert module.Scripted(3).size == 4


def test_dynamo_is_off_where_it_was_imported():
    import torch._dynamo

    assert torch._dynamo.optimize("inductor")(double) is double
    assert torch._dynamo.disable(double) is double
    torch._dynamo.mark_dynamic(torch.ones(2), 0)
    model = torch.compile(torch.nn.Linear(2, 2))
    assert isinstance(model, torch._dynamo.OptimizedModule)
    assert isinstance(model, torch._dynamo.eval_frame.OptimizedModule)


def test_afterwards_what_was_imported_compiles_again():
    kept = torch.compile
    with tpuport.porting():
        assert kept(double) is double
