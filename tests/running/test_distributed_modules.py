"""Collectives with gradients, and modules that are wrapped to be parallel, of one process."""

import copy
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)

import tpuport
from tpuport.foundation.errors import PortError


def group() -> Any:
    return dist.group.WORLD


# A call of a tensor [2, 3].
DIFFERENTIABLE = {
    "broadcast": lambda f, t: f.broadcast(t, 0),
    "gather": lambda f, t: f.gather(t)[0],
    "scatter": lambda f, t: f.scatter([t]),
    "reduce": lambda f, t: f.reduce(t, 0),
    "all_gather": lambda f, t: f.all_gather(t)[0],
    "all_to_all_single": lambda f, t: f.all_to_all_single(torch.zeros_like(t), t),
    "all_reduce": lambda f, t: f.all_reduce(t),
    "reduce_scatter": lambda f, t: f.reduce_scatter(torch.zeros_like(t), [t]),
}
FUNCTIONAL = {
    "all_reduce": lambda f, t: f.all_reduce(t, "sum", group()),
    "broadcast": lambda f, t: f.broadcast(t, 0, group()),
    "all_gather_tensor": lambda f, t: f.all_gather_single(t, 1, group()),
    "reduce_scatter_tensor": lambda f, t: f.reduce_scatter_single(t, "sum", 0, group()),
    "all_to_all_single": lambda f, t: f.all_to_all_single(t, None, None, group()),
    "all_reduce_coalesced": lambda f, t: f.all_reduce_coalesced([t], "sum", group())[0],
}
CALLS = [(with_gradients, n, c) for n, c in DIFFERENTIABLE.items()]
CALLS += [(functional, n, c) for n, c in FUNCTIONAL.items()]
# gloo has no all_to_all, and the gradient of scatter and reduce is for more than one process.
WITH_GRADIENT = ("broadcast", "gather", "all_gather", "all_to_all_single", "all_reduce")


def value_and_gradient(module: Any, name: str, call: Any) -> tuple[torch.Tensor, Any]:
    tensor = torch.arange(6.0).view(2, 3)
    if module is functional or name not in WITH_GRADIENT:
        out = call(module, tensor)
        return (functional.wait_tensor(out) if module is functional else out), None
    tensor.requires_grad_()
    out = call(module, tensor)
    (gradient,) = torch.autograd.grad((out * (out.detach() + 1)).sum(), tensor)
    return out.detach(), gradient


@pytest.fixture(scope="module")
def gloo() -> dict[Any, Any]:
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return {(m, n): value_and_gradient(m, n, c) for m, n, c in CALLS}
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@pytest.fixture
def single(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with tpuport.porting(port_modules=False):
        dist.init_process_group("nccl")
        yield


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize(("module", "name", "call"), CALLS)
def test_values_and_gradients_are_gloos(gloo, module, name, call):
    value, gradient = value_and_gradient(module, name, call)
    assert torch.equal(value, gloo[module, name][0])
    if gradient is not None:
        assert torch.equal(gradient, gloo[module, name][1])


class Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize(("module", "name", "call"), CALLS)
def test_inside_a_program(module, name, call):
    tensor = torch.randn(2, 3)
    ported = tpuport.convert(Call(lambda t: call(module, t * 2) + 1))
    assert torch.equal(tpuport.to_torch(ported(tensor)), tensor * 2 + 1)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def ddp_facts() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(small(), find_unused_parameters=False)
    inputs = torch.randn(5, 3)
    with model.no_sync():
        model(inputs).sum().backward()
    loss = model(inputs).square().sum()
    loss.backward()
    state = model.state_dict()
    model.eval()
    return {
        "keys": list(state),
        "state": list(state.values()),
        "gradients": [p.grad for p in model.parameters()],
        "loss": loss,
        "name": type(model).__name__,
        "training": model.module.training,
        # Lightning asks for these when a training ends.
        "graph": (model.static_graph, model.find_unused_parameters),
        "advice": model._get_ddp_logging_data().get("can_set_static_graph", False),
        "is": isinstance(model, nn.parallel.DistributedDataParallel),
    }


def test_ddp_against_gloo(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        theirs = ddp_facts()
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
    before = nn.parallel.DistributedDataParallel
    with tpuport.porting(port_modules=False):
        dist.init_process_group("nccl")
        ours = ddp_facts()
    for name in ("state", "gradients", "loss"):
        torch.testing.assert_close(ours.pop(name), theirs.pop(name))
    assert ours == theirs
    assert nn.parallel.DistributedDataParallel is before


@pytest.mark.usefixtures("single")
def test_wrapped_modules_in_a_program():
    model = small().eval().cuda()
    inputs = torch.randn(5, 3, device="cuda")
    for wrap in (nn.parallel.DistributedDataParallel, nn.DataParallel):
        wrapped = wrap(model)
        assert isinstance(wrapped, wrap)
        assert next(iter(wrapped.state_dict())) == "module.0.weight"
        torch.testing.assert_close(wrapped(inputs), model(inputs))
        ported = tpuport.to_torch(tpuport.convert(wrapped)(inputs))
        torch.testing.assert_close(ported.cpu(), model(inputs).cpu(), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("single")
def test_a_class_derived_from_ddp():
    class Own(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module, broadcast_buffers=False)

    model = small().eval()
    inputs = torch.randn(5, 3)
    assert torch.equal(Own(model)(inputs), model(inputs))


def test_a_copy_of_ddp_is_a_model_of_its_own(monkeypatch):
    """An average of weights is kept in a copy of the wrapper, as timm's `ModelEma` does."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    x = torch.randn(5, 3)

    def trained(wrap: Any, device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = wrap(small().to(device))
        average = copy.deepcopy(model).eval()
        assert type(average) is type(model)
        assert average.state_dict().keys() == model.state_dict().keys()
        optimizer, outputs = torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(2):
            optimizer.zero_grad()
            model(x.to(device)).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                for held, value in zip(average.parameters(), model.parameters(), strict=True):
                    held.mul_(0.9).add_(value, alpha=0.1)
            outputs += [average(x.to(device)), copy.deepcopy(average)(x.to(device))]
        return [output.detach().cpu() for output in [*outputs, *average.parameters()]]

    want = trained(nn.Sequential, "cpu")
    with tpuport.porting():
        dist.init_process_group("nccl")
        got = trained(nn.parallel.DistributedDataParallel, "cuda")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("single")
def test_ddp_refuses_another_dtype():
    with pytest.raises(PortError, match=r"mixed_precision=\.\.\.\) runs the module in another"):
        nn.parallel.DistributedDataParallel(small(), mixed_precision=object())


def test_ddp_needs_a_group():
    with tpuport.porting(), pytest.raises(ValueError, match="has not been initialized"):
        nn.parallel.DistributedDataParallel(small())


@pytest.mark.usefixtures("single")
def test_fully_shard_leaves_the_module_whole():
    from torch.distributed.fsdp import fully_shard as inside

    model, plain = small().eval(), small().eval()
    plain.load_state_dict(model.state_dict())
    assert inside(model, reshard_after_forward=True) is model
    assert isinstance(model, FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert model.set_requires_gradient_sync(False) is None
    model.unshard()
    inputs = torch.randn(5, 3)
    assert torch.equal(model(inputs), plain(inputs))
    assert list(model.state_dict()) == list(plain.state_dict())
    ported = tpuport.to_torch(tpuport.convert(model)(inputs))
    torch.testing.assert_close(ported, plain(inputs), rtol=1e-4, atol=1e-6)
    with pytest.raises(PortError, match=r"param_dtype=torch\.bfloat16 of a module in another"):
        inside(small(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@pytest.mark.usefixtures("single")
def test_fsdp_is_refused():
    from torch.distributed.fsdp import FullyShardedDataParallel as Inside

    with pytest.raises(PortError, match="turn FSDP off"):
        Inside(small())


def test_the_identical_objects_afterwards():
    import torch.distributed.fsdp as fsdp

    with tpuport.porting():
        assert fsdp.fully_shard is not fully_shard
    assert fsdp.fully_shard is fully_shard
    assert fsdp.FullyShardedDataParallel is FullyShardedDataParallel
