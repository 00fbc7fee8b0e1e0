"""`FullyShardedDataParallel` (FSDP 1) in one process: a shard of one is the module itself.

PyTorch, too, shards nothing there, and keeps the parameters whole (`NO_SHARD`). What is left of it
is the structure: units by `auto_wrap_policy`, the names of parameters, which have
"_fsdp_wrapped_module." before them, and state dicts, which do not.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d

from tpuport.compat.emulated import replicas
from tpuport.compat.emulated.settings import active
from tpuport.compat.shims.distributed_wrappers import alone, everywhere
from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.errors import port_error

_NAME = "FullyShardedDataParallel"
_WRAPPED = "_fsdp_wrapped_module"
_PREFIX = f"{_WRAPPED}."
# Class functions of the original that speak of shards, with what does the same here.
_REFUSED = {
    "full_optim_state_dict": "optim_state_dict",
    "sharded_optim_state_dict": "optim_state_dict",
    "shard_full_optim_state_dict": "optim_state_dict_to_load",
    "flatten_sharded_optim_state_dict": "optim_state_dict_to_load",
    "scatter_full_optim_state_dict": "optim_state_dict_to_load",
    "rekey_optim_state_dict": "optim_state_dict_to_load",
}


class FullyShardedDataParallel(Shim):
    """`FullyShardedDataParallel(module, use_orig_params=True)` holds the module and calls it.

    Flattened parameters (`use_orig_params=False`) and other dtypes (`mixed_precision`) are refused.
    """

    TARGET = "torch.distributed.fsdp.FullyShardedDataParallel"
    REASON = "it shards over processes; here the partitioner shards over a mesh"
    REFERENCE = "torch.distributed.fsdp.FullyShardedDataParallel with gloo and a world of 1"
    MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"

    def replacements(self) -> list[Replacement]:
        home = importlib.import_module(self.MODULE)
        original = home.FullyShardedDataParallel
        refused = {
            name: staticmethod(_refuse(original, name, instead))
            for name, instead in _REFUSED.items()
        }
        ours = alone(original, {**_of_units(original), **_of_models(original), **refused})
        return everywhere(home, original.__name__, ours, ("torch.distributed.fsdp",))


def _init(original: Any) -> Any:
    signature = inspect.signature(original.__init__)

    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if active() is None:
            return original.__init__(self, module, *args, **kwargs)
        # Options that say how parameters are communicated and where they wait change nothing here.
        options = signature.bind(self, module, *args, **kwargs).arguments
        _check(module, options)
        if options.get("device_id") is not None:
            module.to(_device(options["device_id"]))
        policy = options.get("auto_wrap_policy")
        if policy is not None:
            _wrap_parts(self, module, policy, options)
        nn.Module.__init__(self)
        _begin(self, module, original, options)
        return None

    return init


def _only_held(original: Any, name: str, ours: Any) -> Any:
    """Return a method that does `ours` for a unit made here, and PyTorch's own for another."""

    @functools.wraps(getattr(original, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = ours if "_only_process" in vars(self) else getattr(original, name)
        return run(self, *args, **kwargs)

    return method


def _forward(unit: Any, *args: Any, **kwargs: Any) -> Any:
    asked = unit.mixed_precision
    if asked.cast_forward_inputs or (unit._is_root and asked.cast_root_forward_inputs):
        utils: Any = importlib.import_module("torch.distributed.utils")
        args, kwargs = utils._cast_forward_inputs(asked.param_dtype, *args, **kwargs)
    return vars(unit)["_modules"][_WRAPPED](*args, **kwargs)


def _is_root(unit: Any) -> bool:
    return unit._is_root


@contextlib.contextmanager
def _no_sync(unit: Any) -> Iterator[None]:
    del unit
    yield


def _clip_grad_norm(unit: Any, max_norm: Any, norm_type: Any = 2.0) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(unit.parameters(), float(max_norm), float(norm_type))


def _refuse_hook(unit: Any, *args: Any, **kwargs: Any) -> None:
    del unit, args, kwargs
    raise port_error(
        f"{_NAME}.register_comm_hook changes how gradients are communicated, and in one process"
        " nothing is",
        remedy="leave the hook out",
    )


_METHODS: dict[str, Any] = {
    "forward": _forward,
    "apply": nn.Module.apply,
    "_apply": nn.Module._apply,
    "check_is_root": _is_root,
    "no_sync": _no_sync,
    "clip_grad_norm_": _clip_grad_norm,
    "register_comm_hook": _refuse_hook,
}


def _of_units(original: Any) -> dict[str, Any]:
    """Return the methods of one wrapped module."""
    held = {name: _only_held(original, name, ours) for name, ours in _METHODS.items()}
    return {"__init__": _init(original), **held}


def _check(module: nn.Module, options: dict[str, Any]) -> None:
    c10d._get_default_group()  # raises as PyTorch does when there is none
    if replicas.size() > 1:
        raise port_error(
            f"{_NAME} shards over the {replicas.size()} replicas, which tpuport does not do",
            remedy="run without --replicas, where tpuport shards over a mesh",
        )
    if not options.get("use_orig_params"):
        raise port_error(
            f"{_NAME}(use_orig_params=False), which is the default, makes one flat parameter of all"
            " of a unit, which tpuport does not do",
            remedy="turn FSDP off in the program's options (tpuport shards over a mesh), or pass"
            " use_orig_params=True, with which an optimizer sees the parameters as they are",
        )
    wanted = options.get("mixed_precision")
    floating = [p for p in module.parameters() if p.is_floating_point()]
    buffers = [b for b in module.buffers() if b.is_floating_point()]
    groups = {"param_dtype": floating, "reduce_dtype": floating, "buffer_dtype": buffers}
    for name, tensors in groups.items():
        dtype = getattr(wanted, name, None)
        if dtype is not None and any(t.dtype != dtype for t in tensors):
            raise port_error(
                f"{_NAME}(mixed_precision=...) asks for {name}={dtype} of a module in another"
                " dtype, which tpuport does not do for it",
                remedy=f"cast the module by .to({dtype}), use torch.autocast, or set the dtype to"
                " that of the weights in the program's options",
            )
    if any(p.is_meta for p in module.parameters()):
        raise port_error(
            f"{_NAME} is to make weights that are on the meta device, which tpuport does not do",
            remedy="make the module on the CPU, or call module.to_empty(...) and its reset before",
        )


def _device(device: Any) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _wrap_parts(unit: Any, module: nn.Module, policy: Any, options: dict[str, Any]) -> None:
    """Wrap the parts of a module that a policy names, by PyTorch's own walk."""
    wrap = importlib.import_module("torch.distributed.fsdp._wrap_utils")
    given = options.get("ignored_modules") or options.get("ignored_states") or ()
    ignored = {part for one in given if isinstance(one, nn.Module) for part in one.modules()}
    kept = {param for part in ignored for param in part.parameters()}
    kept |= {one for one in given if isinstance(one, nn.Parameter)}
    kwargs = {"mixed_precision": options.get("mixed_precision"), "use_orig_params": True}
    wrap._auto_wrap(module, policy, ignored, kept, kwargs, type(unit))


def _begin(unit: Any, module: nn.Module, original: Any, options: dict[str, Any]) -> None:
    home: Any = importlib.import_module("torch.distributed.fsdp._common_utils")
    api: Any = importlib.import_module("torch.distributed.fsdp.api")
    unit._only_process = True
    setattr(unit, _WRAPPED, module)
    inner: list[Any] = [part for part in module.modules() if isinstance(part, original)]
    for part in inner:
        part._is_root = False
    unit._is_root = True
    unit.sharding_strategy = api.ShardingStrategy.NO_SHARD
    unit.training_state = home.TrainingState.IDLE
    unit._use_orig_params = True
    unit.mixed_precision = options.get("mixed_precision") or api.MixedPrecision()
    unit._handle, unit._ignored_modules, unit.world_size, unit.rank = None, set(), 1, 0
    # What FSDP of torch 2.0 has, which code of its time asks for: a unit's own parameters.
    others = {id(param) for part in inner for param in part.parameters()}
    unit.params = [param for param in module.parameters() if id(param) not in others]
    unit._streams = {}
    unit._state_dict_type = api.StateDictType.FULL_STATE_DICT
    unit._state_dict_config = api.FullStateDictConfig()
    unit._optim_state_dict_config = api.FullOptimStateDictConfig()
    unit._register_state_dict_hook(_without_prefix)
    unit._register_load_state_dict_pre_hook(_with_prefix)


def _without_prefix(unit: Any, state: Any, prefix: str, metadata: Any) -> Any:
    """Name a unit's state as the module alone has it."""
    del metadata
    on_cpu = getattr(unit._state_dict_config, "offload_to_cpu", False)
    for name in [name for name in state if name.startswith(prefix + _PREFIX)]:
        value = state.pop(name)
        state[prefix + name[len(prefix + _PREFIX) :]] = value.cpu() if on_cpu else value
    return state


def _with_prefix(state: Any, prefix: str, *others: Any) -> None:
    """Name a state that is loaded as the unit has it."""
    del others
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}{_PREFIX}{name[len(prefix) :]}"] = state.pop(name)


def _of_models(original: Any) -> dict[str, Any]:
    """Return the class functions, which take a model that has units in it."""

    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """Return the units in a module."""
        units: list[Any] = [one for one in module.modules() if isinstance(one, original)]
        return [one for one in units if not root_only or one.check_is_root()]

    @contextlib.contextmanager
    def summon_full_params(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Name parameters without prefixes in the block; they are whole anyway."""
        home: Any = importlib.import_module("torch.distributed.fsdp._common_utils")
        recurse = args[0] if args else kwargs.get("recurse", True)
        units: list[Any] = fsdp_modules(module) if recurse else [module]
        before = [unit.training_state for unit in units]
        for unit in units:
            unit.training_state = home.TrainingState.SUMMON_FULL_PARAMS
        try:
            yield
        finally:
            for unit, state in zip(units, before, strict=True):
                unit.training_state = state

    def optim_state_dict(
        model: nn.Module, optim: Any, optim_state_dict: Any = None, group: Any = None
    ) -> dict[str, Any]:
        """Return an optimizer's state with the names of the parameters for their numbers."""
        del group
        held = optim.state_dict() if optim_state_dict is None else optim_state_dict
        names = _names_by_number(model, optim)
        return {
            "state": {names[number]: value for number, value in held["state"].items()},
            "param_groups": [
                {**one, "params": [names[number] for number in one["params"]]}
                for one in held["param_groups"]
            ],
        }

    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Any,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return what `optim_state_dict` gave as `optim.load_state_dict` takes it."""
        del is_named_optimizer, group
        numbers = {name: number for number, name in _names_by_number(model, optim).items()}
        found = {
            "state": {numbers[name]: value for name, value in optim_state_dict["state"].items()},
            "param_groups": [
                {**one, "params": [numbers[name] for name in one["params"]]}
                for one in optim_state_dict["param_groups"]
            ],
        }
        if load_directly:
            optim.load_state_dict(found)
        return found

    functions: list[Any] = [fsdp_modules, summon_full_params]
    functions += [optim_state_dict, optim_state_dict_to_load]
    return {one.__name__: staticmethod(_of_model(original, one)) for one in functions}


def _of_model(original: Any, ours: Any) -> Any:
    """Return a class function that is PyTorch's own for a model whose units were not made here."""
    own = getattr(original, ours.__name__)

    @functools.wraps(own)
    def function(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        held = any("_only_process" in vars(module) for module in model.modules())
        return (ours if held else own)(model, *args, **kwargs)

    return function


def _names_by_number(model: nn.Module, optim: Any) -> dict[int, str]:
    """Return the names of parameters by the number that a state dict of the optimizer has."""
    named = {id(param): name.replace(_PREFIX, "") for name, param in model.named_parameters()}
    params = [param for group in optim.param_groups for param in group["params"]]
    return {number: named[id(param)] for number, param in enumerate(params)}


def _refuse(original: Any, name: str, instead: str) -> Any:
    own = getattr(original, name)

    @functools.wraps(own)
    def refused(*args: Any, **kwargs: Any) -> Any:
        """Refuse: there are no shards."""
        if active() is None:
            return own(*args, **kwargs)
        raise port_error(
            f"{_NAME}.{name} speaks of shards of an optimizer's state, and one process has none",
            remedy=f"use {_NAME}.{instead}, or the optimizer's own state_dict and load_state_dict",
        )

    return refused
