"""Functions of tensors of data-dependent size that C++ would take apart by their padded sizes."""

from typing import Any

import torch

from tpuport.tracing.core.context import Trace
from tpuport.tracing.dynamic_shapes.extents import extents_of, refuse
from tpuport.tracing.dynamic_shapes.statistics import flattened, rank_of
from tpuport.tracing.functions.registry import function

_ROUNDED = {
    "lower": torch.floor,
    "higher": torch.ceil,
    "nearest": torch.round,
}


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


@function(torch.quantile, torch.Tensor.quantile, torch.nanquantile, torch.Tensor.nanquantile)
def _quantile(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _named(args, kwargs, "input", "q", "dim", "keepdim")
    source, dim = given["self" if "self" in given else "input"], given.get("dim")
    if not extents_of(source):
        return NotImplemented
    kind = given.get("interpolation", "linear")
    if given.get("out") is not None or kind not in (*_ROUNDED, "linear", "midpoint"):
        raise refuse(func, " with these options")
    whole = dim is None
    rows = flattened(source) if whole else source.movedim(dim, -1)
    wanted = torch.as_tensor(given["q"], dtype=source.dtype)
    skips = func.__name__ == "nanquantile"
    values, _, last = rank_of(rows, -1, skips_nan=skips)
    empty = last < 0
    rank = wanted.reshape(-1) * last.clamp(min=0)
    spoiled = empty if skips else rows.isnan().any(-1, keepdim=True)
    rank = rank if skips else torch.where(spoiled, last.to(rank.dtype), rank)
    rank = rank if kind in ("linear", "midpoint") else _ROUNDED[kind](rank)
    below = rank.floor()
    low, high = (torch.gather(values, -1, at.long()) for at in (below, rank.ceil()))
    weight = torch.where(rank > below, 0.5, 0.0) if kind == "midpoint" else rank - below
    found = torch.where(spoiled, torch.nan, torch.lerp(low, high, weight.to(low.dtype)))
    found = found.movedim(-1, 0)
    if given.get("keepdim"):
        found = (
            found.reshape(-1, *[1] * source.dim())
            if whole
            else found.unsqueeze(dim % source.dim() + 1)
        )
    return found[0] if wanted.dim() == 0 else found


@function(torch.diff, torch.Tensor.diff)
def _diff(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _named(args, kwargs, "input", "n", "dim", "prepend", "append")
    source, dim = given["self" if "self" in given else "input"], given.get("dim", -1)
    beside = [given.get("prepend"), source, given.get("append")]
    if not any(map(extents_of, beside)):
        return NotImplemented
    made = torch.cat([one for one in beside if one is not None], dim)
    dim %= made.dim()
    before, after = ((slice(None),) * dim + (part,) for part in (slice(None, -1), slice(1, None)))
    for _ in range(given.get("n", 1)):
        subtract = torch.logical_xor if made.dtype is torch.bool else torch.sub
        made = subtract(made[after], made[before])
    return made


@function(torch.cov, torch.Tensor.cov)
def _cov(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _named(args, kwargs, "input")
    source = given.pop("input", given.pop("self", None))
    correction = given.pop("correction", 1)
    if not extents_of(source):
        return NotImplemented
    if any(value is not None for value in given.values()) or source.dim() > 2:
        raise refuse(func, " with weights")
    rows = source.unsqueeze(0) if source.dim() < 2 else source
    centred = rows - rows.mean(1, keepdim=True)
    count = torch.ones_like(rows[0]).sum()
    found = centred @ centred.T.conj() / (count - correction).clamp(min=0)
    return found if source.dim() > 1 else found[0, 0]


@function(torch.corrcoef, torch.Tensor.corrcoef)
def _corrcoef(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (source,) = (*args, *kwargs.values())
    if not extents_of(source):
        return NotImplemented
    found = _cov(trace, torch.cov, (source,), {})
    if source.dim() < 2:
        return found / found
    spread = found.diagonal().sqrt()
    return (found / spread[:, None] / spread[None]).clamp(-1, 1)


@function(torch.cosine_similarity)
def _cosine(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the product of unit vectors; the least norm, `eps`, has no gradient of its own."""
    given = _named(args, kwargs, "x1", "x2", "dim", "eps")
    sources = [given["x1"], given["x2"]]
    if not any(map(extents_of, sources)):
        return NotImplemented
    rank = max(source.dim() for source in sources)
    dim = given.get("dim", 1) % rank - rank
    units = []
    for source in sources:
        norm = torch.linalg.vector_norm(source, dim=dim, keepdim=True)
        raised = norm.detach().clamp(min=given.get("eps", 1e-8)) - norm.detach()
        units.append(source / (norm + raised))
    return (units[0] * units[1]).sum(dim)


@function(torch.isin)
def _isin(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _named(args, kwargs, "elements", "test_elements")
    elements, tested = given["elements"], given["test_elements"]
    if not extents_of(elements) and not extents_of(tested):
        return NotImplemented
    if not isinstance(tested, torch.Tensor) or not isinstance(elements, torch.Tensor):
        found = elements == tested
    else:
        found = (elements.unsqueeze(-1) == flattened(tested)).any(-1)
    return ~found if given.get("invert") else found


@function(torch.Tensor.repeat)
def _repeat(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat along dims whose size depends on data by concatenation."""
    source, *given = (*args, *kwargs.values())
    counts = list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else given
    extents = extents_of(source)
    lead = len(counts) - source.dim()
    repeated = [d for d in extents if isinstance(counts[d + lead], int) and counts[d + lead] > 1]
    if not repeated or any(isinstance(count, torch.SymInt) for count in counts):
        return NotImplemented
    for dim in repeated:
        source = torch.cat([source] * counts[dim + lead], dim)
        counts[dim + lead] = 1
    return source.repeat(counts)


@function(torch.eye)
def _eye(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sizes: list[Any] = [size for size in args if isinstance(size, (int, torch.SymInt))]
    if not any(isinstance(size, torch.SymInt) for size in sizes) or kwargs.get("out") is not None:
        return NotImplemented
    rows, columns = (torch.arange(size) for size in (sizes[0], sizes[-1]))
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return torch.ops.aten._to_copy.default(rows[:, None] == columns, dtype=dtype)
