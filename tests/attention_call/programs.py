"""What programs with attention are made of."""

from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

import tpuport
from tpuport.kernels.attention import BlockSizes

# Tiles smaller than the sequences of the tests, so that a whole matrix of scores is no tile.
SMALL = BlockSizes(16, 16, 16)
KERNELS = {
    "blockwise": {"kernel": "blockwise", "blocks": SMALL},
    "splash": {"interpret": True, "blocks": BlockSizes(128, 128, 128)},
}


def arrays(jaxpr: Any) -> set[tuple[int, ...]]:
    """Shapes of all that a program computes outside of its kernels."""
    found: set[tuple[int, ...]] = set()
    for equation in jaxpr.eqns:
        found |= {tuple(v.aval.shape) for v in equation.outvars}
        if equation.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(equation.params):
                found |= arrays(inner)
    return found


def kernels(jaxpr: Any) -> int:
    """How many kernels a program calls."""
    inner = sum(kernels(j) for e in jaxpr.eqns for j in jaxprs_in_params(e.params))
    return inner + sum(e.primitive.name == "pallas_call" for e in jaxpr.eqns)


def of_scores_size(jaxpr: Any, size: int) -> list[tuple[int, ...]]:
    """Shapes with the sequence twice, also laid end to end."""
    return sorted(s for s in arrays(jaxpr) if s.count(size) > 1 or any(n >= size**2 for n in s))


def program(ported: tpuport.PortedModel) -> Any:
    """The one program that a model was compiled to."""
    (compiled,) = ported._cache.values()
    return compiled.run.jaxpr


def gradient_program(ported: tpuport.PortedModel, total: Any, *args: Any, **kwargs: Any) -> Any:
    """The program that computes the gradients of a number made of the outputs."""

    def loss(params: Any) -> Any:
        out, _ = ported.apply(params, ported.buffers, jax.random.key(0), *args, **kwargs)
        return total(out)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(ported.params).jaxpr
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
