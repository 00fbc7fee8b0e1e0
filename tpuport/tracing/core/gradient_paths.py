"""Which inputs of a program get a gradient, where torch's autograd leaves None.

JAX gives zeros to an input that its output does not depend on; torch gives None, and its optimizers
then leave the parameter alone. The answer is read from the program: an output depends on an input
if a path of differentiable values leads there. Values that are zero count (`0 * y`), as in torch.

A branch on a traced value is decided when the program runs. A loop counts as one that runs each of
its lines: a parameter that only a branch inside a loop reads has a gradient.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import api_util
from jax.extend import core

from tpuport.tracing.core.view_steps import replace_value


@dataclass(frozen=True)
class Path:
    """The inputs that an output depends on, as bits.

    Attributes:
        must: whichever branches are taken.
        may: if some branches are taken.
        open: those of `must` that a branch inside a loop may not read after all.
    """

    must: int = 0
    may: int = 0
    open: int = 0

    def __or__(self, other: "Path") -> "Path":
        return Path(self.must | other.must, self.may | other.may, self.open | other.open)

    def __and__(self, other: "Path") -> "Path":
        """Return what holds whichever of two branches is taken."""
        return Path(self.must & other.must, self.may | other.may, self.open | other.open)

    def __lshift__(self, count: int) -> "Path":
        return Path(self.must << count, self.may << count, self.open << count)

    def through(self, inputs: Sequence["Path"]) -> "Path":
        """Return the path from where the inputs come from."""
        must = (p.must for i, p in enumerate(inputs) if self.must >> i & 1)
        may = (p.may for i, p in enumerate(inputs) if self.may >> i & 1)
        unsure = (p.may if self.open >> i & 1 else p.open for i, p in enumerate(inputs))
        return Path(_union(must), found := _union(may), _union(unsure) & found)

    def looped(self) -> "Path":
        """Return the path through a loop, in which branches count as taken."""
        return Path(self.may, self.may, self.open | (self.may & ~self.must))


def _union(bits: Any) -> int:
    return functools.reduce(int.__or__, bits, 0)


def _bit(index: int) -> Path:
    return Path(1 << index, 1 << index)


_NONE = Path()
# Calls by the name of their body.
_CALLS = {
    **{"jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr"},
    **{"closed_call": "call_jaxpr", "core_call": "call_jaxpr", "shard_map": "jaxpr"},
}
_INLINED = {"jit", "pjit", "closed_call", "core_call"}
_RECOMPUTED = {"remat2", "checkpoint"}


class Paths:
    """The paths through the programs inside of one program, each found once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, list[Path]]] = {}

    def of(self, jaxpr: Any) -> list[Path]:
        """Return for each output of a jaxpr the inputs that it depends on."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known = self._known.get(id(jaxpr))
        if known is None:
            known = self._known[id(jaxpr)] = (jaxpr, self._found(jaxpr))
        return known[1]

    def _found(self, jaxpr: Any) -> list[Path]:
        paths = {var: _bit(i) for i, var in enumerate(jaxpr.invars) if _is_float(var)}
        for eqn in jaxpr.eqns:
            given = [_of(paths, atom) for atom in eqn.invars]
            if any(p.may for p in given):
                for var, path in zip(eqn.outvars, self.of_equation(eqn), strict=True):
                    paths[var] = path.through(given)
        return [_of(paths, atom) for atom in jaxpr.outvars]

    def of_equation(self, eqn: Any) -> list[Path]:
        """Return for each output of an equation the operands that it depends on."""
        name = eqn.primitive.name
        rule = _RULES.get(name)
        if name in _CALLS:
            found = self.of(eqn.params[_CALLS[name]])
        elif rule is not None:
            found = rule(self, eqn)
        else:
            found = [_all_of(eqn)] * len(eqn.outvars)
        return [p if _is_float(v) else _NONE for v, p in zip(eqn.outvars, found, strict=True)]


def _of(paths: dict[Any, Path], atom: Any) -> Path:
    return _NONE if isinstance(atom, core.Literal) else paths.get(atom, _NONE)


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def _all_of(eqn: Any) -> Path:
    bits = _union(1 << i for i, atom in enumerate(eqn.invars) if _is_float(atom))
    return Path(bits, bits)


def _branches(paths: Paths, eqn: Any) -> list[Path]:
    sides = [paths.of(branch) for branch in eqn.params["branches"]]
    merged = [functools.reduce(Path.__and__, parts) for parts in zip(*sides, strict=True)]
    return [p << 1 for p in merged]  # the index is before the operands


def _settled(body: list[Path], carried: int, before: int, feed: int) -> list[Path]:
    """Return what values that a loop carries depend on after any number of rounds.

    Args:
        body: the paths of the body's outputs.
        carried: the number of values that it carries.
        before: the number of constants, which are the body's first inputs.
        feed: the number of inputs after the carried values.
    """
    state = [_bit(before + i) for i in range(carried)]
    inputs = [*map(_bit, range(before)), *state, *map(_bit, range(before + carried, feed))]
    while True:
        after = [
            old | p.looped().through(inputs) for old, p in zip(state, body[:carried], strict=True)
        ]
        if after == state:
            return [p.looped().through(inputs) for p in body]
        state = after
        inputs[before : before + carried] = state


def _scan(paths: Paths, eqn: Any) -> list[Path]:
    body, params = paths.of(eqn.params["jaxpr"]), eqn.params
    return _settled(body, params["num_carry"], params["num_consts"], len(eqn.invars))


def _while(paths: Paths, eqn: Any) -> list[Path]:
    test, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carried = len(eqn.outvars)
    found = _settled(paths.of(eqn.params["body_jaxpr"]), carried, consts, consts + carried)
    # The loop may run no round at all.
    found = [p | _bit(consts + i) for i, p in enumerate(found)]
    return [p << test for p in found]


def _custom_jvp(paths: Paths, eqn: Any) -> list[Path]:
    del paths
    if eqn.params.get("name") == replace_value.__name__:
        return [_bit(0)]
    return [_all_of(eqn)] * len(eqn.outvars)


def _custom_vjp(paths: Paths, eqn: Any) -> list[Path]:
    del paths
    # A custom autograd function of the user's says which arguments its backward gives a gradient.
    owner = getattr(getattr(eqn.params["bwd"], "f", None), "__self__", None)
    reached = getattr(owner, "reached", None)
    if reached is None:
        return [_all_of(eqn)] * len(eqn.outvars)
    first = eqn.params["num_consts"]
    bits = _union(1 << first + i for i, flag in enumerate(reached()) if flag)
    return [Path(bits, bits)] * len(eqn.outvars)


_RULES: dict[str, Callable[[Paths, Any], list[Path]]] = {
    "stop_gradient": lambda paths, eqn: [_NONE],
    "cond": _branches,
    "scan": _scan,
    "while": _while,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "optimization_barrier": lambda paths, eqn: [_bit(i) for i in range(len(eqn.outvars))],
}


# -- branches that the program decides -------------------------------------------------------------


@dataclass(frozen=True)
class _Flag:
    """The inputs that a value depends on: bits, and numbers of arrays with a flag for each."""

    bits: int = 0
    terms: frozenset[int] = frozenset()

    def __or__(self, other: "_Flag") -> "_Flag":
        return _Flag(self.bits | other.bits, self.terms | other.terms)


@dataclass
class _Evaluation:
    """The evaluation of a program together with the flags that its branches decide."""

    paths: Paths
    count: int
    terms: list[jax.Array] = field(default_factory=list)

    def run(self, jaxpr: Any, consts: Any, args: Any, flags: list[_Flag]) -> Any:
        """Return a jaxpr's outputs and the flag of each."""
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= zip(jaxpr.invars, args, strict=True)
        known = dict(zip(jaxpr.invars, flags, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        def flag(atom: Any) -> _Flag:
            return _Flag() if isinstance(atom, core.Literal) else known.get(atom, _Flag())

        for eqn in jaxpr.eqns:
            operands, given = list(map(read, eqn.invars)), list(map(flag, eqn.invars))
            outs, found = self._equation(eqn, operands, given)
            values |= zip(eqn.outvars, outs, strict=True)
            known |= zip(eqn.outvars, found, strict=True)
        return list(map(read, jaxpr.outvars)), list(map(flag, jaxpr.outvars))

    def _equation(self, eqn: Any, operands: list[Any], given: list[_Flag]) -> Any:
        found, name = self.paths.of_equation(eqn), eqn.primitive.name
        if any(p.must != p.may for p in found):
            if name in _INLINED:
                body = eqn.params[_CALLS[name]]
                return self.run(body.jaxpr, body.consts, operands, given)
            if name in _RECOMPUTED:
                options = {k: eqn.params[k] for k in ("policy", "prevent_cse")}
                body = self._with_vectors(core.ClosedJaxpr(eqn.params["jaxpr"], []), given)
                return self._received(jax.checkpoint(body, **options)(*operands))
            if name == "cond":
                sides = [self._with_vectors(side, given[1:]) for side in eqn.params["branches"]]
                return self._received(jax.lax.switch(operands[0], sides, *operands[1:]))
        flags = [
            functools.reduce(
                _Flag.__or__, (f for i, f in enumerate(given) if p.may >> i & 1), _Flag()
            )
            for p in found
        ]
        return _bound(eqn, operands), flags

    def _with_vectors(self, closed: Any, given: list[_Flag]) -> Callable[..., Any]:
        def body(*operands: Any) -> Any:
            outs, flags = self.run(closed.jaxpr, closed.consts, operands, given)
            return outs, list(map(self.vector, flags))

        return body

    def _received(self, results: Any) -> tuple[list[Any], list[_Flag]]:
        outs, vectors = results
        first = len(self.terms)
        self.terms += vectors
        return outs, [_Flag(terms=frozenset({first + i})) for i in range(len(vectors))]

    def vector(self, flag: _Flag) -> jax.Array:
        """Return a flag for each input, as one array."""
        fixed = jnp.asarray(np.array([bool(flag.bits >> i & 1) for i in range(self.count)]))
        return functools.reduce(jnp.logical_or, (self.terms[i] for i in flag.terms), fixed)


def _bound(eqn: Any, operands: list[Any]) -> list[Any]:
    """Run one equation, in the place and the settings that it was traced in."""
    given = {a: v for a, v in zip(eqn.invars, operands, strict=True) if isinstance(a, core.Var)}
    info = api_util.debug_info("one equation", _bound, (), {}).with_unknown_names()
    piece = core.Jaxpr([], list(given), eqn.outvars, [eqn], eqn.effects, info)
    return core.jaxpr_as_fun(core.ClosedJaxpr(piece, []))(*given.values())


def evaluated(
    closed: Any, paths: Paths, inputs: int, args: Sequence[Any], outputs: Sequence[int]
) -> tuple[list[Any], jax.Array | None]:
    """Run a program, and find out which of its first inputs some outputs depend on.

    Args:
        closed: the program, a closed jaxpr.
        paths: the paths through it.
        inputs: the number of inputs that are asked about.
        args: its arguments, flat.
        outputs: the outputs that are asked about.

    Returns:
        The results, and flags of shape (outputs, inputs); None if they do not depend on the values.
    """
    found = paths.of(closed.jaxpr)
    wanted = (1 << inputs) - 1
    if all((found[i].must ^ found[i].may) & wanted == 0 for i in outputs):
        return core.jaxpr_as_fun(closed)(*args), None
    run = _Evaluation(paths, inputs)
    given = [_Flag(1 << i if i < inputs else 0) for i in range(len(args))]
    outs, flags = run.run(closed.jaxpr, closed.consts, args, given)
    return outs, jnp.stack([run.vector(flags[i]) for i in outputs])


# -- gradients with flags --------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HasGradient:
    """Which parameters have a gradient, where torch leaves others at None.

    Attributes:
        always: names of those that have one whatever the values are.
        decided: for those that a branch of the program reads, whether it did; (), bool.
        unsure: names for which a branch in a loop decides. They count as having one.
    """

    always: frozenset[str] = field(metadata={"static": True})
    decided: dict[str, jax.Array]
    unsure: frozenset[str] = field(metadata={"static": True})

    def __getitem__(self, name: str) -> bool | jax.Array:
        """Return whether a parameter has a gradient: known, or a (), bool array."""
        return name in self.always or self.decided.get(name, False)


def value_and_grad(function: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """Differentiate with respect to a dict, as `jax.value_and_grad(..., has_aux=True)`.

    Args:
        function: from a dict of arrays and other arguments to a scalar and anything else.

    Returns:
        A function of the same arguments that returns ((scalar, rest), gradients, `HasGradient`).
        A gradient that torch would leave at None is zeros, and flagged.
    """

    def differentiated(params: dict[str, Any], *rest: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *rest)
        names, tree, paths = sorted(params), jax.tree.structure(shape), Paths()
        others = jax.tree.leaves(rest)

        def run(params: dict[str, Any]) -> Any:
            args = [*jax.tree.leaves(params), *others]
            outs, flags = evaluated(closed, paths, len(names), args, [0])
            value, aux = jax.tree.unflatten(tree, outs)
            return value, (aux, flags)

        (value, (aux, flags)), grads = jax.value_and_grad(run, has_aux=True)(params)
        path = paths.of(closed.jaxpr)[0]
        always, some, unsure = (
            [i for i in range(len(names)) if bits >> i & 1]
            for bits in (path.must, path.may & ~path.must, path.open)
        )
        decided = {} if flags is None else {names[i]: flags[0, i] for i in some}
        known, loops = (frozenset(names[i] for i in part) for part in (always, unsure))
        return (value, aux), grads, HasGradient(known, decided, loops)

    return differentiated
