"""Pallas calls of a jaxpr: the work and transfers of each, and how to compile it alone."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core

from tpuport.cost.kernel_masks import active_shares
from tpuport.cost.walking import PALLAS, open_jaxpr, sub_jaxprs

# A kernel's author puts a branch under `jax.named_scope` of this name if almost no step takes it: a
# way back to exact results, say. Its products and its loops then count as never run.
SELDOM = "seldom"


@dataclass(frozen=True)
class KernelCall:
    """One Pallas call.

    Args:
        name: the kernel's name.
        grid: its grid.
        args: shapes and dtypes of its operands.
        run: the call as a function of its operands.
        flops: FLOPs of one call.
        exact: whether the FLOPs are the cost estimate of the kernel's author, or of the steps that
            its mask does not skip; otherwise they are of every step of the grid.
        products: FLOPs of the body's products, summed over every step of the grid.
        bytes: bytes of its operands and results, each once.
        step_bytes: bytes that a step of the grid transfers, on average.
        parallel: whether a dim of the grid may be split over the cores of a chip.
        trips: how often each loop in the body that has products runs.
        active: the share of the steps of the grid that are not skipped; None if it is not known.
    """

    name: str
    grid: tuple[int, ...]
    args: tuple[jax.ShapeDtypeStruct, ...]
    run: Callable[..., Any] = field(compare=False)
    flops: int
    exact: bool
    products: int
    bytes: int
    step_bytes: float
    parallel: bool
    trips: tuple[int, ...]
    active: float | None = None

    @property
    def steps(self) -> int:
        """Return the steps of the grid of one call."""
        return math.prod(self.grid)


def find_calls(jaxpr: Any) -> list[KernelCall]:
    """Return every distinct Pallas call of a jaxpr, at any depth, in the order of the program."""
    found: dict[KernelCall, None] = {}
    _find_calls(open_jaxpr(jaxpr), active_shares(jaxpr), found)
    return list(found)


def _find_calls(jaxpr: Any, shares: dict[int, float], found: dict[KernelCall, None]) -> None:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == PALLAS:
            found.setdefault(read_call(eqn, shares.get(id(eqn))))
        else:
            for sub in sub_jaxprs(eqn):
                _find_calls(sub, shares, found)


def read_call(eqn: Any, active: float | None = None) -> KernelCall:
    """Describe a `pallas_call` equation; `active` is the share of its steps that compute."""
    params = eqn.params
    mapping = params["grid_mapping"]
    grid = tuple(int(size) for size in mapping.grid)
    cost = params["cost_estimate"]
    body = params["jaxpr"]
    products = body_flops(body) * math.prod(grid)
    estimated = int(cost.flops) if cost else 0
    arrays = [*(v.aval for v in eqn.invars), *(v.aval for v in eqn.outvars)]
    semantics = getattr(params["compiler_params"], "dimension_semantics", None) or ()
    return KernelCall(
        name=str(params["name"]),
        grid=grid,
        args=tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars),
        run=lambda *args: eqn.primitive.bind(*args, **params),
        flops=estimated or round(products * (1.0 if active is None else active)),
        products=products,
        exact=bool(estimated or active is not None),
        bytes=sum(_bytes(aval) for aval in arrays),
        step_bytes=sum(_block_bytes(block, grid) for block in mapping.block_mappings),
        parallel=any("parallel" in str(one) for one in semantics),
        trips=tuple(_trips(body)),
        active=active,
    )


def body_flops(jaxpr: Any) -> int:
    """Count multiplications and additions of the products in a kernel's body, for one step."""
    total = 0
    for eqn in jaxpr.eqns:
        if _is_seldom(eqn):
            continue
        if eqn.primitive.name == "dot_general":
            contracted, batch = eqn.params["dimension_numbers"]
            sizes = dot_sizes(eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, contracted, batch)
            total += 2 * math.prod(sizes)
        inner = [body_flops(sub) for sub in sub_jaxprs(eqn)]
        if eqn.primitive.name == "cond":
            total += max(inner)
        else:
            total += eqn.params.get("length", 1) * sum(inner) if inner else 0
    return total


def dot_sizes(lhs: Any, rhs: Any, contracted: Any, batch: Any) -> tuple[int, int, int, int]:
    """Return batch, rows, columns and contraction of a `dot_general`."""
    num_batch = math.prod(lhs[dim] for dim in batch[0])
    contraction = math.prod(lhs[dim] for dim in contracted[0])
    rows = math.prod(n for d, n in enumerate(lhs) if d not in (*batch[0], *contracted[0]))
    columns = math.prod(n for d, n in enumerate(rhs) if d not in (*batch[1], *contracted[1]))
    return num_batch, rows, columns, contraction


def _is_seldom(eqn: Any) -> bool:
    return SELDOM in str(eqn.source_info.name_stack).split("/")


def _trips(jaxpr: Any, *, never: bool = False) -> Iterator[int]:
    """Yield trip counts of the loops in a body that stay loops and multiply, outermost first."""
    for eqn in jaxpr.eqns:
        inner = list(sub_jaxprs(eqn))
        if eqn.primitive.name == "scan" and any(body_flops(sub) for sub in inner):
            unroll = eqn.params["unroll"]
            unroll = eqn.params["length"] if unroll is True else max(int(unroll), 1)
            if eqn.params["length"] > unroll:
                yield 0 if never else eqn.params["length"] // unroll
        for sub in inner:
            yield from _trips(sub, never=never or _is_seldom(eqn))


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def _block_bytes(block: Any, grid: tuple[int, ...]) -> float:
    """Return a step's transfer of one operand: its block whenever the block's index changes.

    How often that is follows from the innermost dim of the grid that the index depends on.
    """
    array = block.array_aval
    sizes = [getattr(dim, "block_size", dim) for dim in block.block_shape]
    elements = math.prod(int(size) for size in sizes if isinstance(size, int))
    changes = _changing_dims(block.index_map_jaxpr, len(grid))
    every = math.prod(grid[max(changes) + 1 :]) if changes else math.prod(grid)
    return elements * array.dtype.itemsize / every


def _changing_dims(index_map: Any, num_dims: int) -> list[int]:
    """Return the dims of the grid that a block's index depends on."""
    jaxpr = open_jaxpr(index_map)
    depends: dict[Any, set[int]] = {var: {dim} for dim, var in enumerate(jaxpr.invars[:num_dims])}
    for eqn in jaxpr.eqns:
        inputs = [depends.get(v, set()) for v in eqn.invars if not isinstance(v, core.Literal)]
        for var in eqn.outvars:
            depends[var] = set().union(*inputs)
    found = (depends.get(v, set()) for v in jaxpr.outvars if not isinstance(v, core.Literal))
    return sorted(set().union(*found))
