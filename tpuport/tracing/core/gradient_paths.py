"""Which inputs of a program get a gradient, where torch's autograd leaves None.

JAX gives zeros to an input that its output does not depend on; torch gives None, and its optimizers
then leave the parameter alone. The answer is read from the program: an output depends on an input
if a path of differentiable values leads there (`paths.py`). Values that are zero count (`0 * y`),
as in torch.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from tpuport.tracing.core.paths import CALLS, INLINED, RECOMPUTED, Paths, bound
from tpuport.tracing.core.untaken import gated, runs_branches


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
            if name in INLINED:
                body = eqn.params[CALLS[name]]
                return self.run(body.jaxpr, body.consts, operands, given)
            if name in RECOMPUTED:
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
        return bound(eqn, operands), flags

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
    if runs_branches(closed):
        closed = jax.make_jaxpr(gated(closed, outputs))(*args)
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


def as_torch(gradients: dict[str, Any]) -> dict[str, Any]:
    """Return gradients as torch has them: those of complex numbers are the conjugates of jax's.

    A step against them, not against jax's, makes the loss smaller.
    """
    is_complex = jnp.iscomplexobj
    return {name: g.conj() if is_complex(g) else g for name, g in gradients.items()}


def value_and_grad(function: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """Differentiate with respect to a dict, as `jax.value_and_grad(..., has_aux=True)`.

    Args:
        function: from a dict of arrays and other arguments to a scalar and anything else.

    Returns:
        A function of the same arguments that returns ((scalar, rest), gradients, `HasGradient`).
        A gradient that torch would leave at None is zeros, and flagged.
    """

    return lambda params, *rest: _differentiated(function, params, rest, keeps=False)[:3]


def kept_value_and_grad(function: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """Do as `value_and_grad`, and return what the backward pass is given last: a list of arrays."""
    return lambda params, *rest: _differentiated(function, params, rest, keeps=True)


def _differentiated(
    function: Callable[..., tuple[Any, Any]],
    params: dict[str, Any],
    rest: tuple[Any, ...],
    *,
    keeps: bool,
) -> tuple[tuple[Any, Any], Any, HasGradient, list[Any]]:
    closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *rest)
    names, tree, paths = sorted(params), jax.tree.structure(shape), Paths()
    others = jax.tree.leaves(rest)

    def run(params: dict[str, Any]) -> Any:
        args = [*jax.tree.leaves(params), *others]
        outs, flags = evaluated(closed, paths, len(names), args, [0])
        value, aux = jax.tree.unflatten(tree, outs)
        return value, (aux, flags)

    kept: list[Any] = []
    if keeps:
        value, pull, (aux, flags) = jax.vjp(run, params, has_aux=True)
        (grads,) = pull(jnp.ones_like(value))
        given = {id(leaf) for leaf in jax.tree.leaves((params, rest))}
        kept = [leaf for leaf in jax.tree.leaves(pull) if id(leaf) not in given]
    else:
        (value, (aux, flags)), grads = jax.value_and_grad(run, has_aux=True)(params)
    path = paths.of(closed.jaxpr)[0]
    always, some, unsure = (
        [i for i in range(len(names)) if bits >> i & 1]
        for bits in (path.must, path.may & ~path.must, path.open)
    )
    decided = {} if flags is None else {names[i]: flags[0, i] for i in some}
    known, loops = (frozenset(names[i] for i in part) for part in (always, unsure))
    return (value, aux), grads, HasGradient(known, decided, loops), kept
