"""FSDP 1 of one process: a script's run is that with PyTorch's own over gloo."""

import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

import tpuport
from tpuport.foundation.errors import PortError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
FULL, LOCAL = fsdp.StateDictType.FULL_STATE_DICT, fsdp.StateDictType.LOCAL_STATE_DICT


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)  # what follows takes a bias out
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.linear(x)).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)
        self.scale = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)) * self.scale

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def built(device: str, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": True, **options}
    return fsdp.FullyShardedDataParallel(
        Net().to(device), device_id=torch.device(device), **options
    )


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def script(device: str, **options: Any) -> dict[str, Any]:
    """Train, save, load and go on; return all that can be seen."""
    sharded = fsdp.FullyShardedDataParallel
    model = built(device, sync_module_states=device == "cuda", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.linspace(-1, 1, 12, device=device).view(3, 4).square()
    x = x.half() if "mixed_precision" in options else x  # which makes it float32 again
    seen: dict[str, Any] = {"losses": [], "norms": []}

    def step() -> None:
        with model.no_sync():
            model(x).square().mean().backward()
        loss = model(x).square().mean()
        loss.backward()
        seen["losses"].append(loss.item())
        seen["norms"].append(model.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    kept, moments = model.state_dict(), sharded.optim_state_dict(model, optimizer)
    seen["kept"], seen["moments"] = plain(kept), plain(moments["state"])
    with sharded.state_dict_type(model, LOCAL):
        seen["local"] = plain(model.state_dict())
    config = fsdp.FullStateDictConfig(offload_to_cpu=True)
    with sharded.state_dict_type(model, FULL, config):
        seen["offloaded"] = {name: one.device.type for name, one in model.state_dict().items()}
    with sharded.summon_full_params(model):
        seen["whole"] = [name for name, _ in model.named_parameters()]
    seen["names"] = [(name, p.shape) for name, p in model.named_parameters()]
    seen["modules"] = [name for name, _ in model.named_modules()]
    units = sharded.fsdp_modules(model)
    seen["roots"] = [unit.check_is_root() for unit in units], len(sharded.fsdp_modules(model, True))
    seen["through"] = model.scale, type(model.module).__name__, model.sharding_strategy

    model = built(device, **options)
    model.load_state_dict(kept)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = sharded.optim_state_dict_to_load(model, optimizer, moments)
    optimizer.load_state_dict(given)
    step()
    model.apply(lambda module: module.eval())
    seen["result"] = plain(model(x))
    seen["state"] = plain(model.state_dict())
    return seen


@pytest.fixture
def gloo():
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    sys.excepthook = hook


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixed_precision": fsdp.MixedPrecision(torch.float32, cast_forward_inputs=True)},
        {"auto_wrap_policy": None, "mixed_precision": fsdp.MixedPrecision(torch.float32)},
        {"sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP, "forward_prefetch": True},
    ],
    ids=["units", "cast", "one", "strategy"],
)
@pytest.mark.usefixtures("gloo")
def test_a_script_is_that_of_pytorchs_own(options: dict[str, Any]):
    want = script("cpu", **options)
    dist.destroy_process_group()
    with tpuport.porting():
        dist.init_process_group("nccl")
        got = script("cuda", **options)
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in ("losses", "norms", "kept", "local", "result", "state", "moments"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5)
        del got[name], want[name]
    assert got == want


@pytest.mark.usefixtures("gloo")
def test_a_class_that_is_kept_is_pytorchs_own_outside_of_a_block(monkeypatch: pytest.MonkeyPatch):
    want = script("cpu")
    with tpuport.porting():
        kept = fsdp.FullyShardedDataParallel
    assert kept is not fsdp.FullyShardedDataParallel
    monkeypatch.setattr(fsdp, "FullyShardedDataParallel", kept)
    got = script("cpu")
    for name in ("losses", "norms", "kept", "local", "result", "state", "moments"):
        torch.testing.assert_close(got.pop(name), want.pop(name), rtol=0, atol=0)
    assert got == want
    model = built("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert kept.full_optim_state_dict(model, optimizer)["state"] == {}


@pytest.fixture
def ported():
    with tpuport.porting():
        dist.init_process_group("nccl")
        yield
        dist.destroy_process_group()


@pytest.mark.usefixtures("ported")
def test_what_would_change_numbers_or_shapes_is_refused():
    half = torch.bfloat16
    for options, error in {
        "use_orig_params": (
            False,
            r"use_orig_params=False\), which is the default, makes one flat",
        ),
        "mixed_precision": (fsdp.MixedPrecision(half), r"param_dtype=torch\.bfloat16 of a module"),
    }.items():
        with pytest.raises(PortError, match=error[1]):
            built("cuda", **{options: error[0]})
    for dtypes in ({"reduce_dtype": half}, {"buffer_dtype": half}):
        with pytest.raises(PortError, match=rf"{next(iter(dtypes))}=torch\.bfloat16 of a module"):
            built("cuda", mixed_precision=fsdp.MixedPrecision(**dtypes))
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_original_params'"):
        built("cuda", use_original_params=True)
    with torch.device("meta"):
        net = Net()
    with pytest.raises(PortError, match="weights that are on the meta device"):
        fsdp.FullyShardedDataParallel(net, use_orig_params=True)
    model = built("cuda")
    with pytest.raises(PortError, match="register_comm_hook changes how gradients"):
        model.register_comm_hook(None, lambda *given: None)
    with pytest.raises(PortError, match=r"full_optim_state_dict speaks of shards"):
        fsdp.FullyShardedDataParallel.full_optim_state_dict(model, None)


@pytest.mark.usefixtures("ported")
def test_parts_are_wrapped_by_a_function_of_sizes_and_others_are_left():
    def policy(*args: Any, **kwargs: Any) -> bool:
        return size_based_auto_wrap_policy(*args, min_num_params=15, **kwargs)

    model = built("cuda", auto_wrap_policy=policy)
    assert len(fsdp.FullyShardedDataParallel.fsdp_modules(model)) > 1
    left = Net().cuda()
    model = fsdp.FullyShardedDataParallel(
        left,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        ignored_modules=[left.blocks[0]],
        use_orig_params=True,
    )
    assert not isinstance(left.blocks[0], fsdp.FullyShardedDataParallel)
    assert isinstance(left.blocks[1], fsdp.FullyShardedDataParallel)
    assert len(model.params) == 5  # of the head and of the block that is left


def test_it_needs_a_group():
    with tpuport.porting(), pytest.raises(ValueError, match="has not been initialized"):
        built("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not dist.is_initialized()
