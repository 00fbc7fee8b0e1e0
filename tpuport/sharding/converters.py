"""Converters of existing tables to `ShardingRules`: MaxText's, PyTorch's and transformers'."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from tpuport.foundation.errors import UsageError
from tpuport.sharding.constraints import Activations
from tpuport.sharding.mesh import MeshAxis
from tpuport.sharding.rule_table import ShardingRules
from tpuport.sharding.spec_rule import SpecRule

# MaxText's names of mesh axes. Source: MaxText, configs/base.yml, mesh_axes.
_MAXTEXT_AXES = {
    "data": "data", "fsdp": "fsdp", "fsdp_transpose": "fsdp", "tensor": "tensor",
    "tensor_transpose": "tensor", "tensor_sequence": "tensor", "sequence": "sequence",
    "context": "sequence", "expert": "expert", "model": "tensor", "stage": None,
    "context_autoregressive": None, "autoregressive": None,
}  # fmt: skip

_TENSOR = MeshAxis.TENSOR.value
_GATHERED = "its output is gathered on every chip"
_SPLIT_INPUT = "its input is replicated, and each chip slices its part"
_PACKED = "several projections in one: the cut is contiguous, so its output is exchanged"

# Styles of transformers' `tp_plan`: (weight, bias, communication cost); the modules that a plan
# names are Linears of shape (out, in). Source: transformers 5.23, distributed/tensor_parallel.py.
_COLUMN = (P(_TENSOR, None), P(_TENSOR), "")
_ROW = (P(None, _TENSOR), P(), "")
_WHOLE = (P(), P(), "")
_HF_STYLES: dict[str, tuple[P, P, str]] = {
    "colwise": _COLUMN,
    "colwise_gather_output": (P(_TENSOR, None), P(_TENSOR), _GATHERED),
    "colwise_rep": (P(_TENSOR, None), P(_TENSOR), _GATHERED),
    "packed_colwise": (P(_TENSOR, None), P(_TENSOR), _PACKED),
    "rowwise": _ROW,
    "rowwise_rep": (P(None, _TENSOR), P(), _SPLIT_INPUT),
    "rowwise_split_input": (P(None, _TENSOR), P(), _SPLIT_INPUT),
    "packed_rowwise": (P(None, _TENSOR), P(), _PACKED),
    "embedding_rowwise": (P(_TENSOR, None), P(), ""),
    "embedding_colwise": (P(None, _TENSOR), P(), ""),
    "sequence_parallel": _WHOLE,
    "replicate": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
    "all_reduce": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "local_params": _WHOLE,
}
# Styles without rules here: modules whose parameters have plan entries of their own, and dispatch
# between modules, which the partitioner derives.
_HF_NO_PARAMETERS = {"moe_tp_experts", "moe_identity_expert", "local_params", "all_reduce"}
_HF_EXPERTS = {"grouped_gemm", "ep_router", "ep_dispatch_experts", "gather"}


def from_tp_plan(plan: Mapping[str, str], *, prefix: str = "") -> ShardingRules:
    """Convert a transformers `tp_plan`, such as `model._tp_plan`, to rules.

    Args:
        plan: module (or parameter) names with `*` for layer numbers, to a style; a config's
            `base_model_tp_plan`, too.
        prefix: prefix of the names in the model: `base_model_tp_plan` is about the base model, so
            that of `LlamaForCausalLM` needs `prefix="model."`.

    Raises:
        UsageError: a style is unknown.
    """
    rules: list[SpecRule] = []
    for name, style in plan.items():
        pattern = prefix + name
        if style in _HF_EXPERTS:
            spec = P(MeshAxis.EXPERT.value) if style == "grouped_gemm" else P()
            rules.append(SpecRule(pattern, spec, style, optional=True))
            continue
        if style in _HF_NO_PARAMETERS:
            continue
        if style not in _HF_STYLES:
            known = ", ".join(sorted({*_HF_STYLES, *_HF_EXPERTS, *_HF_NO_PARAMETERS}))
            raise UsageError(f"{name!r} has the unknown style {style!r}; known are {known}")
        rules += _module_rules(pattern, _HF_STYLES[style], style)
    return ShardingRules(rules, name="tp_plan", inputs={"**": P(("data", "fsdp"))})


def from_parallelize_plan(plan: Mapping[str, Any], *, prefix: str = "") -> ShardingRules:
    """Convert a plan of `torch.distributed.tensor.parallel.parallelize_module` to rules.

    Args:
        plan: module names (with `*`) to `ColwiseParallel()`, `RowwiseParallel()`,
            `SequenceParallel()`, `PrepareModuleInput(...)` or `PrepareModuleOutput(...)`, as
            objects of torch's classes or by the names of these.
        prefix: prefix of the names in the model.

    Returns:
        Rules along tensor; `SequenceParallel` and desired layouts of module inputs and outputs
        become specs of activations.

    Raises:
        UsageError: a style is of an unknown class.
    """
    rules: list[SpecRule] = []
    outputs: dict[str, P] = {}
    inputs: dict[str, P] = {}
    for name, style in plan.items():
        pattern, kind = prefix + name, style if isinstance(style, str) else type(style).__name__
        if kind == "ColwiseParallel":
            rules += _module_rules(pattern, _COLUMN, kind)
            _layout(outputs, pattern, getattr(style, "output_layouts", None))
        elif kind == "RowwiseParallel":
            rules += _module_rules(pattern, _ROW, kind)
            _layout(outputs, pattern, getattr(style, "output_layouts", None))
        elif kind == "SequenceParallel":
            rules += _module_rules(pattern, _WHOLE, kind)
            _layout(outputs, pattern, getattr(style, "sequence_sharding", None), sequence=True)
        elif kind == "PrepareModuleInput":
            _layout(inputs, pattern, getattr(style, "desired_input_layouts", None))
        elif kind == "PrepareModuleOutput":
            _layout(outputs, pattern, getattr(style, "desired_output_layouts", None))
        else:
            raise UsageError(
                f"{name!r} has the style {kind}: expected ColwiseParallel, RowwiseParallel,"
                " SequenceParallel, PrepareModuleInput or PrepareModuleOutput"
            )
    return ShardingRules(
        rules,
        name="parallelize_module",
        inputs={"**": P(("data", "fsdp"))},
        activations=Activations(outputs, inputs=inputs),
    )


def from_logical_axes(
    params: Mapping[str, Sequence[str | None]],
    rules: Iterable[tuple[str, Any]],
    *,
    axes: Mapping[str, str | None] | None = None,
) -> ShardingRules:
    """Convert MaxText's (flax's) logical axes to rules.

    Args:
        params: patterns of torch names to the logical axis of each dim, in the order of the torch
            weight: a Linear's is (out, in), so MaxText's `("embed", "mlp")` is `("mlp", "embed")`.
        rules: `logical_axis_rules`: pairs of a logical axis and a mesh axis, several, or None. As
            in flax the first one whose mesh axes are all free in that parameter is taken.
        axes: further names of mesh axes to names of `MeshAxis`; None drops an axis.

    Raises:
        UsageError: a mesh axis is unknown, or a parameter names a logical axis without a rule.
    """
    known: dict[str, str | None] = {**_MAXTEXT_AXES, **(axes or {})}
    table = [(logical, _mesh_axes(logical, given, known)) for logical, given in rules]
    made = []
    for pattern, logical in params.items():
        used: set[str] = set()
        parts: list[Any] = []
        for name in logical:
            chosen = _free_axes(pattern, name, table, used)
            used.update(chosen)
            parts.append(None if not chosen else chosen[0] if len(chosen) == 1 else chosen)
        words = ", ".join(str(name) for name in logical)
        made.append(SpecRule(pattern, P(*parts), f"logical axes ({words})"))
    return ShardingRules(made, name="logical axes", inputs={"**": P(("data", "fsdp"))})


def _module_rules(pattern: str, style: tuple[P, P, str], reason: str) -> list[SpecRule]:
    """Return the rules of a module's weight and bias, or of a parameter that is named itself."""
    weight, bias, cost = style
    made = [
        SpecRule(f"{pattern}.weight", weight, reason, optional=True, cost=cost),
        SpecRule(f"{pattern}.bias", bias, reason, optional=True),
    ]
    last = pattern.rpartition(".")[2]
    if last.startswith(("gate_up_proj", "down_proj", "up_proj", "w1", "w2", "w3")):
        # In mixtures of experts this name is itself a parameter (experts, out, in).
        made.append(SpecRule(pattern, P(None, *weight), reason, optional=True, cost=cost))
    elif last in ("weight", "bias"):
        made = [
            SpecRule(pattern, bias if last == "bias" else weight, reason, optional=True, cost=cost)
        ]
    return made


def _layout(table: dict[str, P], pattern: str, layouts: Any, *, sequence: bool = False) -> None:
    """Add a DTensor layout of activations as a spec, if it differs from a Linear's default."""
    layout = layouts[0] if isinstance(layouts, tuple | list) and layouts else layouts
    dim = getattr(layout, "dim", 1 if sequence else None)
    if dim == 1:
        table[pattern] = P(("data", "fsdp"), _TENSOR)
    elif dim is None and layout is not None:
        table[pattern] = P(("data", "fsdp"))


def _mesh_axes(logical: str, given: Any, known: Mapping[str, str | None]) -> tuple[str, ...]:
    names = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    made: list[str] = []
    for name in names:
        if name not in known:
            raise UsageError(
                f"the logical axis {logical!r} goes to the unknown mesh axis {name!r}; pass"
                f" axes={{{name!r}: 'tensor'}} to say which one it is"
            )
        axis = known[name]
        if axis is not None and axis not in made:
            made.append(axis)
    return tuple(made)


def _free_axes(
    pattern: str, name: str | None, table: list[tuple[str, tuple[str, ...]]], used: set[str]
) -> tuple[str, ...]:
    if name is None:
        return ()
    found = [axes for logical, axes in table if logical == name]
    if not found:
        raise UsageError(f"{pattern!r} names the logical axis {name!r}, which has no rule")
    return next((axes for axes in found if not used & set(axes)), ())
