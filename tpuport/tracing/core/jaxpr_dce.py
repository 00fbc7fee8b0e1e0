"""Dead code elimination for traced programs."""

from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr_consts


def without_dead_code(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program without the equations and constants that no result needs.

    An example is a mask of which attention uses only the structure. XLA drops such equations too,
    but not the constants that only they need, nor do they vanish from the printed program.
    """
    kept = [True] * len(closed.jaxpr.outvars)
    jaxpr, used, _ = dce_jaxpr_consts(closed.jaxpr, kept, instantiate=True)
    return ClosedJaxpr(jaxpr, [c for c, u in zip(closed.consts, used, strict=True) if u])
