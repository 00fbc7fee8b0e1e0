"""Leaving out of a traced program what nothing reads."""

from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr_consts


def without_dead_code(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program without what nothing reads, such as a mask that attention took apart.

    XLA drops it too, but not the constants that only it needs, nor from the program as it is shown.
    """
    kept = [True] * len(closed.jaxpr.outvars)
    jaxpr, used, _ = dce_jaxpr_consts(closed.jaxpr, kept, instantiate=True)
    return ClosedJaxpr(jaxpr, [c for c, u in zip(closed.consts, used, strict=True) if u])
