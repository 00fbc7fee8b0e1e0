"""A size depends on data: boolean masks, nonzero, unique."""

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded
from tpuport.diagnosis.causes._reading import CONVERT, array_type, port_it, traced_value

_BY_HAND = (
    "or keep the full size: torch.where(mask, x, 0) in place of x[mask], and a masked reduction in"
    " place of x[mask].sum()"
)


class DataDependentSize(Cause):
    """The size of a result depends on the data.

    `x[mask]`, `mask.nonzero()` and `torch.unique(x)` have as many elements as the data says. A
    compiled program has fixed shapes, so under a trace the mask would have to be known.
    """

    RULES = ("TPU210", "TPU211", "TPU212", "TPU111")
    RECORDED = (
        Recorded(
            "jax.errors.NonConcreteBooleanIndexError",
            "Array boolean indices must be concrete; got bool[4,3]\n\nSee https://docs.jax.dev/en/"
            "latest/errors.html#jax.errors.NonConcreteBooleanIndexError",
            "`x[x > 0]` under plain torchax and `jax.jit`",
            "a boolean mask selects a number of elements that is unknown while the program is"
            " traced",
        ),
        Recorded(
            "jax.errors.ConcretizationTypeError",
            "Abstract tracer value encountered where concrete value is expected: traced array with"
            " shape int32[]\nThe size argument of jnp.nonzero must be statically specified to use"
            " jnp.nonzero within JAX transformations.\n",
            "`x.nonzero()` under plain torchax and `jax.jit`",
            "the size of the result of jnp.nonzero depends on data, which is unknown while the"
            " program is traced",
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain the error, naming the mask or the function with that size."""
        if raised.is_a("jax.NonConcreteBooleanIndexError"):
            mask = array_type(raised.message)
            return Explanation(
                "a boolean mask selects a number of elements that is unknown while the program is"
                " traced",
                (port_it(raised, CONVERT), _BY_HAND),
                None if mask is None else f"the mask {mask}",
            )
        if raised.is_a("jax.ConcretizationTypeError") and raised.says(
            "must be statically specified"
        ):
            function = raised.message.partition(" within JAX")[0].rpartition(" use ")[2]
            return Explanation(
                f"the size of the result of {function} depends on data, which is unknown while the"
                " program is traced",
                (port_it(raised, CONVERT), f"or give {function} the size that it has at most"),
                traced_value(raised.message),
            )
        return None
