"""Ops on tensors of data-dependent size as other ops: C++ would take them apart by padded sizes.

Source: https://docs.pytorch.org/docs/stable/torch.html defines each by the others.
"""

from typing import Any

import torch

from tpuport.tracing.dynamic_shapes.extents import extents_of
from tpuport.tracing.dynamic_shapes.handlers import handles, tensors_of
from tpuport.tracing.dynamic_shapes.statistics import given_by_name


def _is_static(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not any(map(extents_of, tensors_of(args, kwargs)))


@handles("norm")
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_static(args, kwargs):
        return NotImplemented
    given = given_by_name(func, args, kwargs)
    order = 2 if given.get("p") is None else given["p"]
    return torch.linalg.vector_norm(
        given["self"],
        order,
        dim=given.get("dim") or None,
        keepdim=given.get("keepdim", False),
        dtype=given.get("dtype"),
    )


@handles("dist")
def _dist(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_static(args, kwargs):
        return NotImplemented
    given = given_by_name(func, args, kwargs)
    return torch.linalg.vector_norm(given["self"] - given["other"], given.get("p", 2))


@handles("mv")
def _mv(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_static(args, kwargs):
        return NotImplemented
    return torch.mm(args[0], args[1].unsqueeze(1)).squeeze(1)


@handles("dot")
def _dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_static(args, kwargs):
        return NotImplemented
    made = (args[0] * args[1]).sum()
    return made if made.dtype == args[0].dtype else made.to(args[0].dtype)


@handles("aminmax")
def _aminmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_static(args, kwargs):
        return NotImplemented
    given = given_by_name(func, args, kwargs)
    dim = () if given.get("dim") is None else given["dim"]
    keepdim = given.get("keepdim", False)
    return tuple(one(given["self"], dim, keepdim=keepdim) for one in (torch.amin, torch.amax))


@handles("allclose")
def _allclose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_static(args, kwargs):
        return NotImplemented
    given = given_by_name(func, args, kwargs)
    one, other = given["self"], given["other"]
    error, least = (one - other).abs(), given.get("atol", 1e-8)
    close = (one == other) | (
        error.isfinite() & (error <= least + given.get("rtol", 1e-5) * other.abs())
    )
    if given.get("equal_nan", False):
        close = close | (one.isnan() & other.isnan())
    return close.all().item()
