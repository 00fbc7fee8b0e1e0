"""Values inside of a program to which torch's autograd can ask gradients after its call.

Such a value is a leaf that the call made, or a result that others are computed from. A tap gives
the program one more input for it, zeros that are added to it: their gradient is that of the value.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import api_util
from jax.extend import core

from tpuport.compat.emulated.sparse_gradients import sparse_lookups
from tpuport.foundation.errors import PortError
from tpuport.foundation.interop.device_mark import tag
from tpuport.tracing.core.arguments import result_meta
from tpuport.tracing.state.request import NewLeaf, TraceResult


@jax.custom_jvp
def _tap(value: jax.Array, zeros: jax.Array) -> jax.Array:
    """Return the value; an addition would be one for XLA to find out about."""
    del zeros
    return value


@_tap.defjvp
def _tap_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[0] + tangents[1]


@jax.custom_jvp
def _lasting_tap(value: jax.Array, zeros: jax.Array) -> jax.Array:
    """Return the value: a tap that can be differentiated again and again."""
    del zeros
    return value


@_lasting_tap.defjvp
def _lasting_tap_jvp(primals: Any, tangents: Any) -> Any:
    return _lasting_tap(*primals), tangents[0] + tangents[1]


@dataclass(frozen=True)
class Tapped:
    """A program with its taps.

    Attributes:
        closed: the program; the taps' inputs follow its own.
        leaves: the leaves that it makes, each with the numbers of the outputs that it is.
        inner: the outputs that others are computed from, by number, as the program makes them.
        unsure: the outputs of which nobody can tell, as a region makes them together with others.
        zeros: the taps' inputs: those of the leaves, of inner outputs, of sparse lookups.
        sparse: the inputs whose gradient is sparse, each with its number of lookups.
    """

    closed: Any
    leaves: tuple[tuple[NewLeaf, tuple[int, ...]], ...]
    inner: tuple[tuple[int, ...], ...]
    unsure: tuple[int, ...]
    zeros: list[jax.Array]
    sparse: tuple[tuple[int, int], ...] = ()


def tapped(
    closed: Any, outcome: TraceResult, numbers: Mapping[Any, int], seen: Sequence[bool]
) -> Tapped:
    """Return a program with taps at its leaves and at the outputs that others are computed from.

    Sparse lookups have one each that says which rows were read.

    Args:
        closed: the program, a closed jaxpr.
        outcome: describes its results.
        numbers: the floating outputs by result (its index) and state (its name).
        seen: which floating outputs require grad.

    Raises:
        PortError: a leaf is made in a loop, a branch or a checkpointed region.
    """
    jaxpr = closed.jaxpr
    leaves = [
        (leaf, tuple(numbers[place] for place in (*leaf.results, *leaf.state) if place in numbers))
        for leaf in outcome.new_leaves
    ]
    own = {number for _, those in leaves for number in those}
    found = [leaf_var(jaxpr, leaf.name) for leaf, _ in leaves]
    repeated = {numbers[place] for place in outcome.repeated if place in numbers}
    used = {atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, core.Var)}
    inner: dict[Any, list[int]] = {}
    unsure = []
    for number, flows in enumerate(seen):
        var = jaxpr.outvars[number]
        if not flows or number in own:
            continue
        others = [i for i, one in enumerate(jaxpr.outvars[: len(seen)]) if one is var]
        is_read = var in used or any(i != number and i in repeated for i in others)
        if is_read and number in repeated:
            # It has the value of another tensor, such as its clone: code may have used either.
            unsure.append(number)
        elif is_read and var not in found:
            inner.setdefault(var, []).append(number)
        elif _is_of_region(jaxpr, var, used):
            unsure.append(number)
    order = [var for eqn in jaxpr.eqns for var in eqn.outvars if var in inner]
    lookups = sparse_lookups(jaxpr)
    at = [*found, *order, *(uses for those in lookups.values() for uses in those)]
    if not at:
        return Tapped(closed, (), (), tuple(unsure), [])
    for (leaf, _), var in zip(leaves, at, strict=False):
        if var is None:
            raise _hidden(leaf)
    zeros = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in at]
    made = with_taps(closed, at)
    numbers_of = tuple(tuple(inner[var]) for var in order)
    sparse = tuple((number, len(those)) for number, those in lookups.items())
    return Tapped(made, tuple(leaves), numbers_of, tuple(unsure), zeros, sparse)


# What makes several values, some of which may be computed from others.
_REGIONS = frozenset({"scan", "while", "cond", "checkpoint", "remat2"})


def _is_of_region(jaxpr: Any, var: Any, used: Collection[Any]) -> bool:
    """Return whether a value is one or a part of one that a region makes, with others that count.

    Args:
        jaxpr: the program.
        var: the variable of the value.
        used: the variables that some equation reads.
    """
    makers = {made: eqn for eqn in jaxpr.eqns for made in eqn.outvars}
    counted = {*used, *(one for one in jaxpr.outvars if isinstance(one, core.Var))}
    while (eqn := makers.get(var)) is not None:
        if eqn.primitive.name in _REGIONS:
            return any(one in counted for one in eqn.outvars if one is not var)
        operands = [one for one in eqn.invars if isinstance(one, core.Var)]
        if len(operands) != 1:
            return False
        (var,) = operands
    return False


def leaf_var(jaxpr: Any, name: str) -> Any:
    """Return the variable of a leaf, None if the program does not make it outside of regions."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name" and eqn.params["name"] == name:
            return eqn.outvars[0]
    return None


def with_taps(closed: Any, variables: Sequence[Any], tap: Any = _tap) -> Any:
    """Return a closed jaxpr that has a further input for each variable."""
    replaced: dict[Any, Any] = {}
    taps: dict[Any, Any] = {}
    inputs: list[Any] = []
    for var in variables:
        like = jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
        (eqn,) = jax.make_jaxpr(tap)(like, like).jaxpr.eqns
        # `make_jaxpr` returns the same equation for equal shapes, so each tap gets new variables.
        inputs.append(core.Var(var.aval))
        taps[var] = eqn.replace(invars=[var, inputs[-1]], outvars=[core.Var(var.aval)])

    def now(atom: Any) -> Any:
        return replaced.get(atom, atom) if isinstance(atom, core.Var) else atom

    jaxpr, equations = closed.jaxpr, []
    for eqn in jaxpr.eqns:
        equations.append(eqn.replace(invars=list(map(now, eqn.invars))) if replaced else eqn)
        for var in eqn.outvars:
            if var in taps:
                equations.append(taps[var])
                (replaced[var],) = taps[var].outvars
    info = api_util.debug_info("a program with taps", with_taps, (), {}).with_unknown_names()
    made = core.Jaxpr(
        jaxpr.constvars,
        [*jaxpr.invars, *inputs],
        list(map(now, jaxpr.outvars)),
        equations,
        jaxpr.effects,
        info,
    )
    return core.ClosedJaxpr(made, closed.consts)


def with_leaf_taps(names: Sequence[str]) -> Callable[[Any], Any]:
    """Return what puts taps into a program that makes leaves of such names, in their order."""

    def edit(closed: Any) -> Any:
        return with_taps(closed, [leaf_var(closed.jaxpr, name) for name in names], _lasting_tap)

    return edit


def _hidden(leaf: NewLeaf) -> PortError:
    return PortError(
        f"a tensor of shape {tuple(leaf.meta.shape)} is made a leaf (requires_grad) in a loop, a"
        " branch on data or a checkpointed region, and the call returns or keeps it",
        code="TPU403",
        remedy="make it outside of the region, or leave the class to eager PyTorch: --eager",
    )


def host_leaf(leaf: NewLeaf) -> torch.Tensor:
    """Return an empty tensor for a leaf."""
    like = result_meta(leaf.meta)
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    return tag(torch.nn.Parameter(made) if leaf.is_parameter else made.requires_grad_())
