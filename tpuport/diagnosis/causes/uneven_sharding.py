"""An axis cannot be divided by the size of the mesh axis."""

import re

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded

_FACTS = re.compile(
    r"array axis (\d+) is partitioned (\d+) times, but (?:the|does not evenly divide the) dimension"
    r" size (?:is )?(\d+)"
)


class UnevenSharding(Cause):
    """A dimension is not a multiple of the number of parts.

    A sharding gives each chip a part of the same size, so the dimension has to be a multiple of the
    size of the mesh axis.
    """

    RECORDED = (
        Recorded(
            "jax._src.sharding.IndivisibleError",
            "Sharding NamedSharding(mesh=Mesh('data': 4, axis_types=(Explicit,)), spec=P('data',),"
            " memory_kind=device) implies that array axis 0 is partitioned 4 times, but the"
            " dimension size is 6 (full shape: (6, 2), per-dimension tiling factors: [4, 1] should"
            " evenly divide the shape)",
            "`jax.device_put(jnp.ones((6, 2)), NamedSharding(mesh, P('data')))` on four chips",
            "dimension 0 has 6 elements, which 4 chips cannot share evenly",
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain the error, naming the dimension and the number of parts."""
        found = _FACTS.search(raised.message)
        if found is None:
            return None
        axis, parts, size = map(int, found.groups())
        larger = -(-size // parts) * parts
        return Explanation(
            f"dimension {axis} has {size} elements, which {parts} chips cannot share evenly",
            (
                f"pad it to {larger} (a batch: drop_last=True in the loader, or fill it up and mask"
                " the loss)",
                "or leave that dimension unsharded: None in its place of the PartitionSpec",
            ),
        )
