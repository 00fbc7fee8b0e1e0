"""Wrappers that make a module parallel: in one process, they only hold it.

Among replicas, `DistributedDataParallel` averages the gradients; the others are refused.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d

from tpuport.compat.emulated import replicas
from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.errors import port_error


def everywhere(home: Any, name: str, ours: Any, places: tuple[str, ...]) -> list[Replacement]:
    """Replace a class or function under each name that it has in its module and in others."""
    original = vars(home)[name]
    owners = [home, *(sys.modules[place] for place in places if place in sys.modules)]
    return [
        Replacement(owner, key, ours)
        for owner in owners
        for key, value in list(vars(owner).items())
        if value is original
    ]


def alone(original: Any, attributes: dict[str, Any]) -> Any:
    """Return a subclass of the same name with these attributes."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    bases: Any = (original,)
    return type(original.__name__, bases, {**names, **attributes})


class DistributedDataParallelism(Shim):
    """`DistributedDataParallel` holds the module and calls it; the keys of the state dict begin
    with "module." as always.
    """

    TARGET = "torch.nn.parallel.DistributedDataParallel"
    REASON = "its reducer works on CUDA streams and a real backend"
    REFERENCE = "torch.nn.parallel.DistributedDataParallel with gloo and a world of 1"
    MODULE = "torch.nn.parallel.distributed"

    def replacements(self) -> list[Replacement]:
        name = "DistributedDataParallel"
        home = importlib.import_module("torch.nn.parallel.distributed")
        ours = alone(vars(home)[name], _distributed_attributes(vars(home)[name]))
        return everywhere(home, name, ours, ("torch.nn.parallel", "torch.nn"))


def _attributes(original: Any) -> dict[str, Any]:
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if active() is None:
            return original.__init__(self, module, *args, **kwargs)
        _check(kwargs)
        nn.Module.__init__(self)
        self._only_process = True
        self.module = module
        self.device_ids = None
        self.dim = 0
        self.require_backward_grad_sync = True
        # What frameworks ask it for: Lightning at the end of a training.
        self.static_graph = bool(kwargs.get("static_graph", False))
        self.find_unused_parameters = bool(kwargs.get("find_unused_parameters", False))
        return None

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_only_process" in vars(self):
            return self.module(*args, **kwargs)
        return original.forward(self, *args, **kwargs)

    return {"__init__": init, "forward": forward}


def _check(kwargs: dict[str, Any]) -> None:
    if kwargs.get("mixed_precision") is not None:
        raise port_error(
            "DistributedDataParallel(mixed_precision=...) runs the module in another dtype, which"
            " tpuport does not do for it",
            remedy="leave it out, and cast the module or use torch.autocast",
        )


def _distributed_attributes(original: Any) -> dict[str, Any]:
    attributes = _attributes(original)
    held = attributes["__init__"]

    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        c10d._get_default_group()  # raises as PyTorch does when there is none
        held(self, module, *args, **kwargs)
        if active() is not None and replicas.size() > 1:
            _join_replicas(self, kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_synced_buffers" in vars(self):
            _sync_buffers(self)
        return nn.Module.__call__(self, *args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def train(self: Any, mode: bool = True) -> Any:
        return nn.Module.train(self, mode)

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to communicate."""
        del self, args, kwargs

    def no_data(self: Any) -> dict[str, Any]:
        """Return what the reducer has logged: there is none."""
        return {}

    hooks = ("register_comm_hook", "_register_comm_hook", "_set_static_graph")
    names = dict.fromkeys((*hooks, "_register_fused_optim"), nothing)
    ours = {"__init__": init, "__call__": call, "no_sync": no_sync, "train": train}
    ours["_get_ddp_logging_data"] = no_data
    return {**attributes, **names, **ours, **_copies(original)}


def _copies(original: Any) -> dict[str, Any]:
    def __getstate__(self: Any) -> dict[str, Any]:
        return dict(vars(self)) if "_only_process" in vars(self) else original.__getstate__(self)

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        if "_only_process" not in state:
            original.__setstate__(self, state)
            return
        nn.Module.__setstate__(self, state)
        if "_synced_buffers" in state:
            # Hooks of parameters are not copied with them.
            _average_gradients(self)

    return {"__getstate__": __getstate__, "__setstate__": __setstate__}


_DDP = "DistributedDataParallel"


def _join_replicas(wrapper: Any, kwargs: dict[str, Any]) -> None:
    """Begin with the state of replica 0, and average the gradients after each backward pass."""
    if kwargs.get("process_group") not in (None, c10d.GroupMember.WORLD):
        raise port_error(
            f"{_DDP}(process_group=...) averages within a part of the replicas, which tpuport does"
            " not do",
            remedy="leave it out",
        )
    buffers = list(wrapper.module.buffers())
    replicas.copy_from_first(_DDP, [*wrapper.module.parameters(), *buffers])
    wrapper._synced_buffers = buffers if kwargs.get("broadcast_buffers", True) else []
    wrapper._buffers_may_differ = True
    _average_gradients(wrapper)


def _average_gradients(wrapper: Any) -> None:
    """Average the gradients after each backward pass from now on."""
    wrapper._average_waits = False
    params = [param for param in wrapper.module.parameters() if param.requires_grad]

    def average() -> None:
        wrapper._average_waits = False
        replicas.average_gradients(_DDP, params)

    def ready(param: torch.Tensor) -> None:
        del param
        if wrapper.require_backward_grad_sync and not wrapper._average_waits:
            wrapper._average_waits = True
            torch.autograd.Variable._execution_engine.queue_callback(average)  # type: ignore[attr-defined]

    for param in params:
        param.register_post_accumulate_grad_hook(ready)


def _sync_buffers(wrapper: Any) -> None:
    """Take the buffers of replica 0, if a call since the last time may have changed them."""
    if wrapper._buffers_may_differ and wrapper._synced_buffers:
        replicas.copy_from_first(f"{_DDP}.forward", wrapper._synced_buffers)
    syncs = torch.is_grad_enabled() and wrapper.require_backward_grad_sync
    wrapper._buffers_may_differ = syncs


class FullyShard(Shim):
    """`fully_shard` leaves the parameters unsharded and adds its methods, which do nothing."""

    TARGET = "torch.distributed.fsdp.fully_shard"
    REASON = "it shards over processes; here the partitioner shards over a mesh"
    REFERENCE = "the module itself, which is what one shard of one is"
    MODULE = "torch.distributed.fsdp._fully_shard._fully_shard"
    PLACES: ClassVar[tuple[str, ...]] = (
        "torch.distributed.fsdp",
        "torch.distributed.fsdp._fully_shard",
        "torch.distributed._composable.fsdp",
        "torch.distributed._composable.fsdp.fully_shard",
    )

    def replacements(self) -> list[Replacement]:
        home = importlib.import_module(self.MODULE)
        original, base = home.fully_shard, home.FSDPModule
        methods: dict[str, Any] = {
            name: _do_nothing
            for name, value in vars(base).items()
            if callable(value) and not name.startswith("_")
        }
        # PyTorch's `__new__` finds the module's old class by this index: one base further here.
        methods["_orig_cls_mro_index"] = 1 + base._orig_cls_mro_index
        whole = type("FSDPModule", (base,), {"__module__": base.__module__, **methods})

        def fully_shard(module: Any, **kwargs: Any) -> Any:
            if active() is None:
                return original(module, **kwargs)
            if replicas.size() > 1:
                raise port_error(
                    f"fully_shard shards over the {replicas.size()} replicas, which tpuport does"
                    " not do",
                    remedy="run without --replicas, where tpuport shards over a mesh",
                )
            for one in module if isinstance(module, (list, tuple)) else [module]:
                _check_policy(one, kwargs.get("mp_policy"))
                if not isinstance(one, base):
                    kind = type(one)
                    one.__class__ = type(f"FSDP{kind.__name__}", (whole, kind), {})
            return module

        return everywhere(home, "fully_shard", fully_shard, self.PLACES)


def _do_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing: there is nothing to shard or to communicate."""
    del self, args, kwargs


def _check_policy(module: nn.Module, policy: Any) -> None:
    """Refuse a policy of dtypes that would change numbers."""
    for name in ("param_dtype", "output_dtype"):
        dtype = getattr(policy, name, None)
        if dtype is not None and any(p.dtype != dtype for p in module.parameters()):
            raise port_error(
                f"fully_shard(mp_policy=...) asks for {name}={dtype} of a module in another dtype,"
                " which tpuport does not do for it",
                remedy=f"cast the module by .to({dtype}), or leave the policy out",
            )
