"""Arrays of one computation are on different devices."""

import re

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded

_PROBLEM = "the arguments of one computation are on different devices"
_ARGUMENT = re.compile(
    r"argument (\S+) of (.+?) with shape (\S+) and with device ids (\[[\d, ]*\]) on platform (\w+)"
)


class DeviceMismatch(Cause):
    """The arguments of one computation are on different devices.

    jax moves only uncommitted arrays, which nobody has placed. A committed one (by
    `jax.device_put`, a `NamedSharding`, or as the result of a sharded step) stays, so batch and
    parameters need one mesh.
    """

    RECORDED = (
        Recorded(
            "builtins.ValueError",
            "Received incompatible devices for jitted computation. Got argument a of step with"
            " shape float32[4] and with device ids [0] on platform CPU and argument b of step with"
            " shape float32[4] and with device ids [1] on platform CPU",
            "`step(jax.device_put(a, d[0]), jax.device_put(b, d[1]))`",
            _PROBLEM,
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain the error, listing the device of each argument."""
        if not raised.says("incompatible devices"):
            return None
        found = _ARGUMENT.findall(raised.message)
        return Explanation(
            _PROBLEM,
            (
                "put them onto one mesh: jax.device_put(x, NamedSharding(mesh, P())) for what every"
                " chip needs, P('data') for the batch",
                "or do not place the small ones: jax moves an uncommitted array to where the"
                " others are",
            ),
            None,
            tuple(
                f"{name} {shape} on {platform} {devices}"
                for name, _, shape, devices, platform in found
            ),
        )
