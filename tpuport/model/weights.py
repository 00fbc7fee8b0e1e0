"""The weights of a ported model: loaded from a checkpoint, and named as in a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import torch

from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.tracing.state.module_state import StateTree, state_tree
from tpuport.weights.checkpoint import Checkpoint, of_mapping, open_checkpoint
from tpuport.weights.load import Place, Progress, Wanted, choose, load_arrays
from tpuport.weights.read import same_bits


class LoadResult(NamedTuple):
    """The names without a counterpart, as `torch.nn.Module.load_state_dict` returns them.

    Attributes:
        missing_keys: Weights of the model that the checkpoint lacks.
        unexpected_keys: Tensors of the checkpoint that the model lacks.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_model(
    ported: Any,
    source: str | Path | Mapping[str, Any],
    *,
    strict: bool,
    prefix: str,
    rename: Callable[[str], str | None] | None,
    place: Place | None,
    progress: Progress | None,
    **where: Any,
) -> LoadResult:
    """Load a checkpoint into a ported model; `PortedModel.load` documents it.

    Raises:
        CheckpointError: names, shapes or kinds do not fit, or the checkpoint is damaged.
        UsageError: an argument does not fit.
    """
    module = ported._module
    _refuse_hooks(module)
    if isinstance(source, Mapping) and not isinstance(source, Checkpoint):
        opened = of_mapping(source)
    elif isinstance(source, Checkpoint):
        opened = source
    else:
        opened = open_checkpoint(source, **where)
    tree = state_tree(module)
    first_of = state_names(ported, tree)
    chosen = choose(opened, lambda _, dtype: dtype, only=None, prefix=prefix, rename=rename)
    found = {one.name: one for one in chosen}
    fitting = [one for name, one in found.items() if name in first_of]
    # One name of tied weights is enough: files leave the others out.
    given = {first_of[one.name] for one in fitting}
    missing = [name for name, first in first_of.items() if first not in given]
    unexpected = [name for name in found if name not in first_of]
    leaves = {name: tree.leaves[first] for name, first in first_of.items()}
    wrong = _misfits(opened, fitting, leaves)
    empty = _without_value(ported, tree, given)
    if strict or wrong:
        _refuse(opened, module, missing if strict else [], unexpected if strict else [], wrong)
    if strict and empty:
        raise _no_values(module, tree, empty)
    _refuse_untied(opened, fitting, first_of)
    firsts = [(first_of[one.name], one) for one in fitting]
    held = ported._tracer.casting.held_dtype
    wanted = {n: Wanted(n, one.source, held(n, leaves[n].dtype)) for n, one in firsts}
    arrays = load_arrays(opened, wanted.values(), place=place, progress=progress)
    params = {name: arrays.get(name, value) for name, value in ported.params.items()}
    buffers = {name: arrays.get(name, value) for name, value in ported.buffers.items()}
    ported.params, ported.buffers = params, buffers
    return LoadResult(missing, unexpected)


def state_names(ported: Any, tree: StateTree) -> dict[str, str]:
    """Map every name in the module's `state_dict` to its name in `params` or `buffers`.

    Tied weights and shared modules have several names there, and one here.

    Raises:
        UsageError: a weight is not among the state of the ported model.
    """
    first_of = {id(leaf): name for name, leaf in tree.leaves.items()}
    values = ported.by_fqn()
    found = {}
    for fqn, owner in ported._module.named_modules(remove_duplicate=False):
        start = f"{fqn}." if fqn else ""
        unsaved = owner._non_persistent_buffers_set
        buffers = {n: b for n, b in owner._buffers.items() if n not in unsaved}
        for name, value in {**owner._parameters, **buffers}.items():
            if value is not None:
                found[start + name] = first_of[id(value)]
                if found[start + name] not in values:
                    msg = (
                        f"{start + name!r} is also the attribute {found[start + name]!r} of a"
                        " module, and so a constant of the program; load it before tpuport.convert"
                    )
                    raise UsageError(msg)
    return found


def _misfits(
    opened: Checkpoint, fitting: Sequence[Wanted], leaves: Mapping[str, torch.Tensor]
) -> list[str]:
    wrong = []
    for one in fitting:
        info, leaf = opened[one.source], leaves[one.name]
        if info.shape != tuple(leaf.shape):
            wrong.append(
                f"{one.name!r} has shape {info.shape} in the checkpoint and {tuple(leaf.shape)} in"
                " the model"
            )
        elif _kind(info.dtype) != _kind(leaf.dtype):
            wrong.append(
                f"{one.name!r} is {info.dtype} in the checkpoint and {leaf.dtype} in the model"
            )
    return wrong


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating"
    return "complex" if dtype.is_complex else str(dtype) if dtype is torch.bool else "whole number"


def _without_value(ported: Any, tree: StateTree, given: set[str]) -> list[str]:
    """Return names that would stay abstract: unsaved buffers, tensors that are attributes."""
    values = ported.by_fqn()
    return [
        name
        for name, leaf in tree.leaves.items()
        if name not in given
        and (
            isinstance(values.get(name), jax.ShapeDtypeStruct)
            or (name not in values and isinstance(leaf, torch.Tensor) and leaf.is_meta)
        )
    ]


def _refuse(
    opened: Checkpoint,
    module: torch.nn.Module,
    missing: list[str],
    unexpected: list[str],
    wrong: list[str],
) -> None:
    parts = []
    if missing:
        parts.append(f"missing in the checkpoint: {_listed(missing)}")
    if unexpected:
        parts.append(f"not in the model: {_listed(unexpected)}")
    parts += [*wrong[:8], *([f"and {len(wrong) - 8} more"] if len(wrong) > 8 else [])]
    if not parts:
        return
    start = _common_prefix(missing, unexpected)
    remedy = "" if start is None else f"\nWhat to do: pass prefix={start!r}"
    if not remedy and not wrong:
        remedy = "\nWhat to do: give other names by rename=, or pass strict=False to load what fits"
    lines = "\n  ".join(parts)
    msg = f"{opened.path} does not fit {type(module).__name__}:\n  {lines}{remedy}"
    raise CheckpointError(msg)


def _common_prefix(missing: list[str], unexpected: list[str]) -> str | None:
    """Return the prefix of the model's names in the checkpoint, such as Lightning's `model.`."""
    if not missing:
        return None
    for name in unexpected:
        if name.endswith(missing[0]) and len(name) > len(missing[0]):
            start = name.removesuffix(missing[0])
            if {start + m for m in missing} <= set(unexpected):
                return start
    return None


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _no_values(module: torch.nn.Module, tree: StateTree, empty: list[str]) -> CheckpointError:
    fqn = tree.owners[empty[0]][0] if empty[0] in tree.owners else empty[0].rpartition(".")[0]
    owner = module.get_submodule(fqn)
    where = f"model.{fqn} = {type(owner).__name__}(...)" if fqn else f"model.{empty[0]} = ..."
    return CheckpointError(
        f"{_listed(empty)}: no checkpoint has these values (non-persistent buffers, or tensors that"
        " are plain attributes), and on the meta device they have none.\nWhat to do: make what"
        f" owns them on the CPU before tpuport.convert ({where}), where its constructor computes"
        " them; or set ported.buffers[name] before load(); strict=False leaves them without values"
    )


def _refuse_untied(
    opened: Checkpoint, fitting: Sequence[Wanted], first_of: Mapping[str, str]
) -> None:
    """Refuse a checkpoint with two values for one weight of the model."""
    seen: dict[str, Wanted] = {}
    for one in fitting:
        other = seen.setdefault(first_of[one.name], one)
        if other is one or opened.memory_of(one.source) == opened.memory_of(other.source):
            continue
        if not same_bits(opened.read(one.source), opened.read(other.source)):
            msg = (
                f"{other.name!r} and {one.name!r} are one weight in the model and differ in"
                f" {opened.path}; untie them in the model, or leave one out by rename="
            )
            raise CheckpointError(msg)


def _refuse_hooks(module: torch.nn.Module) -> None:
    """Refuse modules whose own code decides what loading means."""
    for fqn, owner in module.named_modules():
        own = type(owner)._load_from_state_dict
        hooks = [h for h in owner._load_state_dict_pre_hooks.values() if not _is_torchs(h)]
        post = list(owner._load_state_dict_post_hooks.values())
        what = None
        if hooks or post:
            what = "has hooks that change weights as they are loaded"
        elif not _is_torchs(own):
            what = f"has a {type(owner).__name__}._load_from_state_dict of its own"
        elif type(owner).get_extra_state is not torch.nn.Module.get_extra_state:
            what = "keeps extra state in checkpoints"
        if what is not None:
            msg = (
                f"{fqn or type(owner).__name__!r} {what}, which needs PyTorch: call"
                " model.load_state_dict(torch.load(path, weights_only=True)) on the CPU, then"
                " tpuport.convert(model)"
            )
            raise UsageError(msg)


def _is_torchs(function: Any) -> bool:
    function = getattr(function, "hook", function)
    return (getattr(function, "__module__", "") or "").partition(".")[0] == "torch"


def checkpoint_values(
    ported: Any, like: Checkpoint | None
) -> tuple[dict[str, jax.Array], dict[str, torch.dtype]]:
    """Return what `state_dict` of the module has; of tied weights the names that `like` has."""
    tree = state_tree(ported._module)
    first_of = state_names(ported, tree)
    values = ported.by_fqn()
    there = {first for name, first in first_of.items() if like is not None and name in like}
    found: dict[str, Any] = {}
    for name, first in first_of.items():
        if name in like if like is not None and first in there else name == first:
            found[name] = values[first]
    empty = [name for name, value in found.items() if isinstance(value, jax.ShapeDtypeStruct)]
    if empty:
        msg = (
            f"the model was converted from the meta device, and {empty[0]!r} has a shape but no"
            " value; load a checkpoint first: ported.load(path)"
        )
        raise UsageError(msg)
    return found, {name: tree.leaves[first_of[name]].dtype for name in found}
