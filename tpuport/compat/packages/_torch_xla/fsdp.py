"""FSDP: version 2 by spmd, and version 1, whose module is one shard of one."""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from tpuport.compat.emulated import replicas
from tpuport.compat.packages._torch_xla import spmd
from tpuport.compat.packages._torch_xla.checkpoint import checkpoint
from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.device_mark import XLA
from tpuport.tracing.core.errors import port_error
from tpuport.weights.checkpoint import open_checkpoint
from tpuport.weights.torch_xla_files import Shard, joined

# From here on, each function and class is named and called as in torch_xla.


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Return True."""
    del args, kwargs
    return True


def lambda_auto_wrap_policy(
    module: Any, recurse: bool, unwrapped_params: int, lambda_fn: Callable[[Any], bool]
) -> bool:
    """Return whether a function wants the module wrapped."""
    del unwrapped_params
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: Any, recurse: bool, unwrapped_params: int, transformer_layer_cls: Any
) -> bool:
    """Return whether the module is of one of the classes."""
    del unwrapped_params
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: Any,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Any = None,
    exclude_wrap_modules: Any = None,
) -> bool:
    """Return whether the module has so many parameters."""
    if recurse:
        kept = force_leaf_modules or {torch.nn.MultiheadAttention}
    else:
        kept = exclude_wrap_modules or {torch.nn.ModuleList, torch.nn.ModuleDict}
    return unwrapped_params >= min_num_params and not isinstance(module, tuple(kept))


def recursive_wrap(
    module: torch.nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., Any],
    ignored_modules: Any = (),
    ignored_params: Any = (),
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[Any, int]:
    """Wrap the modules that a policy names, the innermost first.

    Returns:
        The module, wrapped or not, and how many parameters were wrapped.
    """
    left_out = {id(p) for p in ignored_params}
    total = sum(p.numel() for p in module.parameters() if id(p) not in left_out)
    if not auto_wrap_policy(module=module, recurse=True, unwrapped_params=total):
        return module, 0
    wrapped = 0
    for name, child in list(module.named_children()):
        if any(child is one for one in ignored_modules):
            continue
        made, number = recursive_wrap(
            child, auto_wrap_policy, wrapper_cls, ignored_modules, ignored_params, **kwargs
        )
        setattr(module, name, made)
        wrapped += number
    rest = total - wrapped
    if not only_wrap_children and auto_wrap_policy(
        module=module, recurse=False, unwrapped_params=rest
    ):
        options = {**kwargs, **getattr(module, "_wrap_overrides", {})}
        return wrapper_cls(module, **options), total
    return module, wrapped


class _Wrapper(torch.nn.Module):
    """A module that holds another one, and has its attributes."""

    @property
    def module(self) -> torch.nn.Module:
        """Return the wrapped module."""
        return self._orig_module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_orig_module":
                raise
            return getattr(self._orig_module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._orig_module[key]  # type: ignore[index]


def _check_wrappable(module: torch.nn.Module, cls: type) -> None:
    if isinstance(module, cls):
        raise UsageError(f"{cls.__name__}: the module is wrapped already")
    if getattr(type(module), "forward", None) in (None, torch.nn.Module.forward):
        raise UsageError(
            f"{cls.__name__}: {type(module).__name__} has no forward, so it is never called. What"
            " to do: wrap what calls it"
        )


class SpmdFullyShardedDataParallel(_Wrapper):
    """FSDP by spmd: each parameter is sharded along its longest dim, the output along its first."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        mesh: Any = None,
        shard_output: Callable[[Any, Any], Any] | None = None,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., Any] | None = None,
        extra_data_axis: str | None = None,
    ) -> None:
        _check_wrappable(module, SpmdFullyShardedDataParallel)
        mesh = spmd.get_global_mesh() if mesh is None else mesh
        if mesh is None:
            raise UsageError("FSDPv2 has no mesh. What to do: pass mesh=, or call set_global_mesh")
        for axis in ("fsdp", *([extra_data_axis] if extra_data_axis else [])):
            if axis not in (mesh.axis_names or ()):
                raise UsageError(f"FSDPv2: the mesh has no axis {axis!r}, it has {mesh.axis_names}")
        super().__init__()
        if auto_wrap_policy is not None:
            wrapper = auto_wrapper_callable or SpmdFullyShardedDataParallel
            options = {"mesh": mesh, "shard_output": shard_output}
            recursive_wrap(module, auto_wrap_policy, wrapper, only_wrap_children=True, **options)
        self._orig_module = module.to(XLA)
        self._mesh = mesh
        for param in module.parameters():
            if not spmd.sharding_text(param):
                spmd.mark_sharding(param, mesh, _longest(param.shape))
        self._extra_axis = extra_data_axis
        self._shard_output = shard_output or self._shard_first

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and shard its output."""
        output = self._orig_module(*args, **kwargs)
        self._shard_output(output, self._mesh)
        return output

    def _shard_first(self, output: Any, mesh: Any) -> None:
        if isinstance(output, tuple):
            warnings.warn(
                "FSDPv2: of an output that is a tuple only the first element is sharded;"
                " shard_output= does otherwise",
                stacklevel=2,
            )
            output = output[0]
        if not isinstance(output, torch.Tensor):
            raise UsageError(
                f"FSDPv2: the output is a {type(output).__name__}. What to do: pass shard_output="
            )
        if output.dim():
            axis: Any = (self._extra_axis, "fsdp") if self._extra_axis else "fsdp"
            spmd.mark_sharding(output, mesh, (axis, *[None] * (output.dim() - 1)))


def _longest(shape: Any) -> tuple[Any, ...]:
    sizes = list(shape)
    at = sizes.index(max(sizes)) if sizes else -1
    return tuple("fsdp" if dim == at else None for dim in range(len(sizes)))


# Options of `XlaFullyShardedDataParallel` that change no number, or only where replicas differ.
_WITHOUT_EFFECT = {
    *("reshard_after_forward", "flatten_parameters", "execute_sharding_on_init"),
    *("optimization_barrier_in_forward", "optimization_barrier_in_backward"),
    *("mark_step_on_finalization", "disable_reshard_on_root", "reduce_scatter_output_dtype"),
    *("use_all_gather_via_all_reduce", "reduce_scatter_bucket_size_mb", "sharding_groups"),
    *("all_gather_bucket_size_mb", "coalesce_all_gather_ops", "pin_layout_in_collective_ops"),
    *("shard_param_on_dim_0", "_debug_print", "_debug_msg", "opt_flatten_overlap"),
    *("sharding_rank", "sharding_world_size", "_shard_size_multiple", "param_init_fn"),
    *("_debug_dummy_forward_pass", "_debug_dummy_all_gather_op", "_debug_dummy_all_reduce_op"),
    *("_debug_dummy_reduce_scatter_op", "_debug_dummy_optimizer_step", "cast_persistence"),
}


class XlaFullyShardedDataParallel(_Wrapper):
    """FSDP among one replica: the module itself. Options that change dtypes are refused."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        del fp32_reduce_scatter, auto_wrap_policy, auto_wrapper_callable
        _check_wrappable(module, XlaFullyShardedDataParallel)
        if replicas.size() > 1:
            raise port_error(
                f"XlaFullyShardedDataParallel shards over the {replicas.size()} replicas, which"
                " tpuport does not do",
                remedy="run without --replicas, or average the gradients by xm.optimizer_step",
            )
        unknown = sorted(options.keys() - _WITHOUT_EFFECT)
        if unknown:
            raise UsageError(f"XlaFullyShardedDataParallel: {unknown[0]!r} is no option of 2.9.0")
        tensors = {compute_dtype: module.parameters(), buffer_dtype: module.buffers()}
        for dtype, held in tensors.items():
            if dtype is None:
                continue
            if any(t.is_floating_point() and t.dtype != dtype for t in held):
                raise port_error(
                    f"XlaFullyShardedDataParallel asks for {dtype} of a module in another dtype,"
                    " which tpuport does not do for it",
                    remedy="cast the module, or use torch_xla.amp.autocast",
                )
        super().__init__()
        self._orig_module = module.to(XLA)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self._orig_module(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, groups: Any = None) -> Any:
        """Clip the gradients by their norm."""
        del groups
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def get_shard_metadata(self) -> dict[str, Any]:
        """Return how the states of all ranks make the module's: one rank, which has all of it."""
        buffers = {name: {"_orig_dtype": value.dtype} for name, value in self.named_buffers()}
        none: dict[str, Any] = {}
        found = {"shard_info": none, "flatten_info": none, "buffer_info": buffers}
        return {**found, "world_size": 1, "rank": 0}


def consolidate_sharded_state_dicts(
    state_dict_list: list[dict[str, Any]], shard_metadata: dict[str, Any]
) -> OrderedDict[str, torch.Tensor]:
    """Return the state of the module that was wrapped, from the states of all ranks in order."""
    shards = [
        Shard("state_dict_list", state, {**shard_metadata, "rank": rank})
        for rank, state in enumerate(state_dict_list)
    ]
    values = joined(shards)
    return OrderedDict(
        (name, value if isinstance(value, torch.Tensor) else value.read())
        for name, value in values.items()
    )


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str, ckpt_suffix: str = "*.pth", save_path: str = "", save_model: bool = True
) -> tuple[OrderedDict[str, torch.Tensor], str | None]:
    """Return the state of the module that was wrapped, from files; no code in them is run."""
    opened = open_checkpoint(ckpt_prefix + ckpt_suffix, key="model")
    state = OrderedDict((name, opened.read(name)) for name in opened)
    if not save_model:
        return state, None
    place = save_path or f"{ckpt_prefix}_consolidated.pth"
    torch.save({"model": state}, place)
    return state, place


def checkpoint_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module, computed again in its backward pass."""
    forward = module.forward

    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **kwargs)

    module.forward = again  # type: ignore[method-assign]
    return module
