"""`torch.compile` and TorchScript inside a porting context: the function itself."""

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


def test_functions_of_torch_that_scripts_ignore_are_marked():
    # torch.distributed.optim scripts classes at its first import, which may be in a context.
    @torch.jit.ignore
    def warns():
        pass

    assert torch._jit_internal.is_ignored_fn(warns)


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
