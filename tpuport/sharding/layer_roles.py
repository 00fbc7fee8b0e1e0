"""The role of each parameter of a module, read from names, shapes and the order of layers.

A tensor-parallel pair is a layer whose output is sharded (column) and the next one, whose input is
sharded alike (row): one all-reduce after the second is all that they cost. Source: Shoeybi et al.,
Megatron-LM, arXiv:1909.08053, section 3. A wrong guess costs communication, never correctness.
"""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

from tpuport.sharding.heads import heads_of

_QKV = re.compile(
    r"(^|_)(q|k|v|query|key|value)(_proj|_lin)?$|^to_(q|k|v)$|^w(q|k|v)$|^add_(q|k|v)_proj$"
)
_FUSED = re.compile(r"(^|_)(qkv|c_attn|query_key_value|in_proj|to_qkv|to_kv|wqkv)(_proj)?$", re.I)
_QK_NORM = re.compile(r"^(norm|ln)_(added_)?(q|k)$|^(q|k)_(norm|ln)$")
_OUT = re.compile(r"(^|_)(o_proj|out_proj|to_out|to_add_out|attn_proj|out_lin)$")
_MODULATION = re.compile(
    r"(^|[._])(mod|modulation|adaln\w*|ada_ln\w*|time_proj|norm\w*)([._]|$)", re.I
)
_HEADS = re.compile(r"(^|\.)(lm_head|output_projection|embed_out)$")
_EXPERTS = re.compile(r"(^|\.)(experts?|\w+_experts)(\.|$)")

# A module with more layers than this is a network, not a unit of a few related layers.
_UNIT = 24
_FUSED_COST = (
    "a fused projection is split after it is computed, at other places than its shards: its output"
    " is exchanged between chips"
)
_BESIDE_COST = (
    "it takes two concatenated outputs, each sharded by itself: its input is exchanged between"
    " chips"
)
# Embeddings with fewer rows are positions or kinds of token, not a vocabulary.
_VOCABULARY = 1024


@runtime_checkable
class PackedLinear(Protocol):
    """A linear layer whose weight is in several buffers, such as integer codes and their scales."""

    in_features: int
    out_features: int

    @property
    def weight_dims(self) -> Mapping[str, tuple[int, int]]:
        """Return by buffer its dim of output features and its dim of input features."""
        ...


class LayerRole(enum.StrEnum):
    """Roles of parameters."""

    COLUMN = "column"
    FUSED = "fused column"
    ROW = "row"
    MODULATION = "modulation"
    VOCABULARY = "vocabulary"
    EXPERTS = "experts"
    NORM = "norm"
    OTHER = "other"


@dataclass(eq=False)
class Layer:
    """A Linear or convolution: its name, its sizes, and which dims of its weight they are.

    `out_dim` and `in_dim` are dims of the weight. `heads` is the number of attention heads in its
    output, if it is known.
    """

    fqn: str
    module: torch.nn.Module
    kind: str
    ins: int
    outs: int
    out_dim: int
    in_dim: int
    role: LayerRole = LayerRole.OTHER
    reason: str = ""
    heads: int | None = None
    closed: bool = False
    cost: str = ""


@dataclass(frozen=True)
class Use:
    """The role of one parameter, with a reason in words.

    `out_dim` and `in_dim` are dims of a weight. `one_expert` says that it belongs to one expert of
    a list. `cost` describes the communication of sharding it over tensor, in addition to the pair's
    all-reduce.
    """

    role: LayerRole
    reason: str
    out_dim: int = 0
    in_dim: int = 1
    heads: int | None = None
    cost: str = ""
    one_expert: bool = False


def uses_of(module: torch.nn.Module) -> dict[str, Use]:
    """Return the use of each parameter of a module, by fqn; of tied ones the first name counts."""
    layers: dict[str, Layer] = {}
    _visit(module, "", module, layers, set())
    for layer in layers.values():
        if layer.role is LayerRole.OTHER:
            _left_over(layer)
    uses: dict[str, Use] = {}
    for fqn, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            path = f"{fqn}.{name}" if fqn else name
            uses[path] = _use(fqn, name, owner, parameter, layers.get(fqn))
        for path, (out_dim, in_dim) in _packed(fqn, owner).items():
            name = path.rpartition(".")[2]
            found = _use(fqn, name, owner, owner.get_buffer(name), layers.get(fqn))
            uses[path] = replace(found, out_dim=out_dim, in_dim=in_dim)
        for name in _stacked(owner):
            uses[f"{fqn}.{name}"] = Use(LayerRole.EXPERTS, "experts in one buffer")
    for fqn, parent in module.named_modules():
        uses |= _norms_of(fqn, parent, layers)
    return uses


def packed_weights(module: torch.nn.Module) -> set[str]:
    """Return the fqns of the buffers that hold weights of packed layers."""
    return {
        name
        for fqn, one in module.named_modules()
        for name in (*_packed(fqn, one), *(f"{fqn}.{name}" for name in _stacked(one)))
    }


def _stacked(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the buffers of a module that hold one part an expert."""
    return getattr(module, "stacked_buffers", ())


def _packed(fqn: str, module: torch.nn.Module) -> dict[str, tuple[int, int]]:
    dims = module.weight_dims if isinstance(module, PackedLinear) else {}
    return {f"{fqn}.{name}" if fqn else name: one for name, one in dims.items()}


def _norms_of(fqn: str, parent: torch.nn.Module, layers: dict[str, Layer]) -> dict[str, Use]:
    """Return the uses of norms over the channels of a column: they are sharded as the column is.

    A norm may work on each channel by itself or on all of them.
    """
    found: dict[str, Use] = {}
    columns: list[Layer] = []
    latest: Layer | None = None
    for name, child in parent.named_children():
        path = f"{fqn}.{name}" if fqn else name
        layer = layers.get(path)
        if layer is not None:
            latest = layer
            columns += [layer] if layer.role is LayerRole.COLUMN else []
        column = None
        if isinstance(child, torch.nn.modules.batchnorm._BatchNorm):
            column = latest
        elif _QK_NORM.search(name):
            column = columns[0] if columns else None
        if column is None or column.role is not LayerRole.COLUMN:
            continue
        reason = f"follows {column.fqn.rpartition('.')[2]}"
        for leaf, value in (*child.named_parameters(), *child.named_buffers()):
            if tuple(value.shape) == (column.outs,):
                found[f"{path}.{leaf}"] = Use(LayerRole.COLUMN, reason, heads=column.heads)
    return found


def blocks_of(module: torch.nn.Module) -> list[str]:
    """Return patterns of a module's repeated blocks: children of a list, all of one class."""
    found: list[str] = []
    for fqn, child in module.named_modules():
        if any(fqn == seen or fqn.startswith(f"{seen}.") for seen in found):
            continue
        if not isinstance(child, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        kinds = [type(c) for c in child]
        simple = (kinds and issubclass(kinds[0], torch.nn.ModuleList)) or not list(child.children())
        if len(kinds) > 1 and len(set(kinds)) == 1 and not simple and _is_deep(child[0]):
            found.append(fqn)
    return [f"{fqn}.*" if fqn else "*" for fqn in found]


def _is_deep(module: torch.nn.Module) -> bool:
    """Return whether a module can be a block: it has child modules, and weights."""
    has_weights = any(True for _ in module.parameters()) or packed_weights(module)
    return any(True for _ in module.children()) and bool(has_weights)


def _visit(
    module: torch.nn.Module,
    fqn: str,
    parent: torch.nn.Module,
    layers: dict[str, Layer],
    seen: set[int],
) -> list[Layer]:
    """Return the layers of a module in the order of registration, and pair those of a unit."""
    if id(module) in seen:
        return []
    seen.add(id(module))
    layer = _layer(fqn, module)
    if layer is not None:
        layers[fqn] = layer
        _name(layer, parent)
        return [layer]
    inside: list[Layer] = []
    for name, child in module.named_children():
        holder = parent if isinstance(module, torch.nn.ModuleList) else module
        inside += _visit(child, f"{fqn}.{name}" if fqn else name, holder, layers, seen)
    if len(inside) <= _UNIT:
        for kind in ("linear", "convolution"):
            _pair([item for item in inside if item.kind == kind])
    return inside


def _layer(fqn: str, module: torch.nn.Module) -> Layer | None:
    """Return a module as a layer, if it multiplies channels, else None."""
    any_module: Any = module
    if isinstance(module, torch.nn.Linear | PackedLinear):
        return Layer(
            fqn, any_module, "linear", any_module.in_features, any_module.out_features, 0, 1
        )
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        # transformers.pytorch_utils.Conv1D: a Linear with a transposed weight.
        return Layer(fqn, module, "linear", any_module.nx, any_module.nf, 1, 0)
    if isinstance(module, torch.nn.modules.conv._ConvNd) and module.groups == 1:
        dims = (1, 0) if module.transposed else (0, 1)
        channels = (module.in_channels, module.out_channels)
        return Layer(fqn, module, "convolution", *channels, *dims)
    return None


def _name(layer: Layer, parent: torch.nn.Module) -> None:
    """Set the role that a Linear's own name implies."""
    if layer.kind != "linear":
        return
    parts = [part for part in layer.fqn.split(".") if not part.isdecimal()]
    last = parts[-1] if parts else ""
    if _FUSED.search(last):
        layer.role, layer.reason = LayerRole.FUSED, "several projections in one, by name"
    elif _QKV.search(last):
        layer.role, layer.reason = LayerRole.COLUMN, "attention projection, by name"
        layer.heads = heads_of(parent, last, layer.outs)
    elif _OUT.search(last):
        layer.role, layer.reason, layer.closed = LayerRole.ROW, "attention output, by name", True


def _pair(inside: list[Layer]) -> None:
    """Find a column and row layers among those of a unit, by their shapes.

    A layer is the row of the earlier layers whose output it takes, unless another pair is between
    them.
    """
    free = sum(layer.role is LayerRole.OTHER for layer in inside)
    start = 0
    if any(layer.kind == "convolution" and layer.closed for layer in inside):
        return  # the remaining layers connect units
    for index, layer in enumerate(inside):
        if layer.role is LayerRole.ROW:
            start = index + 1
        elif layer.role is LayerRole.OTHER:
            sources = _sources(inside[start:index], layer, free)
            if sources:
                _close(sources, layer)
                start = index + 1
    _pair_side_by_side(inside)


def _pair_side_by_side(inside: list[Layer]) -> None:
    """Find a row that takes two columns' outputs concatenated: attention parallel to an MLP."""
    open_ones = [
        s for s in inside if s.role in (LayerRole.OTHER, LayerRole.COLUMN) and not s.closed
    ]
    for row in [layer for layer in open_ones if layer.role is LayerRole.OTHER]:
        same = [s for s in open_ones if s is not row and s.ins == row.outs]
        attention = [s for s in same if s.role is LayerRole.COLUMN]
        beside = [s for s in same if s.role is LayerRole.OTHER]
        fits = [s for s in beside if attention and s.outs + attention[-1].outs == row.ins]
        if fits:
            _close([*attention, fits[0]], row)
            fits[0].role, row.cost = LayerRole.COLUMN, _BESIDE_COST
            return


def _sources(before: list[Layer], layer: Layer, free: int) -> list[Layer]:
    """Return the layers whose outputs a layer takes."""
    before = [
        s
        for s in before
        if s.role in (LayerRole.OTHER, LayerRole.COLUMN, LayerRole.FUSED) and not s.closed
    ]
    if layer.kind == "convolution":
        last = before[-1:]
        return [s for s in last if s.outs == layer.ins and not _is_patch(s)]
    fits = [s for s in before if layer.ins in _widths(s)]
    # Their input's width is this layer's output width again, or no other layer could take them.
    return [s for s in fits if s.ins == layer.outs or (free == 2 and len(before) == 1)]


def _widths(source: Layer) -> tuple[int, ...]:
    """Return the widths that a layer's output can have after it is split into equal parts."""
    parts = (1, 2, 3) if source.role in (LayerRole.OTHER, LayerRole.FUSED) else (1,)
    return tuple(source.outs // n for n in parts if source.outs % n == 0)


def _is_patch(layer: Layer) -> bool:
    """Return whether a convolution splits an image into patches."""
    module: Any = layer.module
    return module.kernel_size == module.stride and max(module.stride) > 1


def _close(sources: list[Layer], row: Layer) -> None:
    row.role, row.closed = LayerRole.ROW, True
    row.reason = (
        f"takes the output of {', '.join(s.fqn.rpartition('.')[2] or s.fqn for s in sources)}"
    )
    for source in sources:
        source.closed = True
        if source.role is LayerRole.OTHER:
            fused = source.kind == "linear" and source.outs != row.ins
            source.role = LayerRole.FUSED if fused else LayerRole.COLUMN
            source.reason = f"its output goes to {row.fqn.rpartition('.')[2] or row.fqn}"


def _left_over(layer: Layer) -> None:
    """Set the role of a layer that belongs to no pair."""
    if layer.kind == "linear" and _HEADS.search(layer.fqn):
        layer.role, layer.reason = LayerRole.VOCABULARY, "output over the vocabulary"
    elif (
        layer.kind == "linear"
        and _MODULATION.search(layer.fqn)
        and layer.outs >= 2 * layer.ins
        and layer.outs % layer.ins == 0
    ):
        layer.role = LayerRole.MODULATION
        layer.reason = "modulation: one vector a sample, so gathering its output costs little"


def _use(
    fqn: str,
    name: str,
    owner: torch.nn.Module,
    parameter: torch.Tensor,
    layer: Layer | None,
) -> Use:
    if _EXPERTS.search(fqn) and parameter.ndim == 3 and not isinstance(owner, PackedLinear):
        return Use(LayerRole.EXPERTS, f"{parameter.shape[0]} experts in one parameter")
    one = re.search(r"(^|\.)\w*experts\.\d+(\.|$)", fqn) is not None
    if layer is not None:
        dims = (layer.out_dim, layer.in_dim) if parameter.ndim > 1 else (0, 0)
        reason = layer.reason if parameter.ndim > 1 else f"follows its layer, {layer.role}"
        cost = layer.cost or (_FUSED_COST if layer.role is LayerRole.FUSED else "")
        cost = cost if parameter.ndim > 1 else ""
        return Use(layer.role, reason, *dims, layer.heads, cost, one)
    if isinstance(owner, torch.nn.MultiheadAttention) and name.startswith("in_proj"):
        cost = _FUSED_COST if parameter.ndim > 1 else ""
        return Use(LayerRole.FUSED, "several projections in one, by name", cost=cost)
    if isinstance(owner, torch.nn.Embedding) and parameter.shape[0] >= _VOCABULARY:
        return Use(LayerRole.VOCABULARY, "embedding over the vocabulary")
    if "norm" in type(owner).__name__.lower():
        return Use(LayerRole.NORM, "norm")
    return Use(LayerRole.OTHER, "")
