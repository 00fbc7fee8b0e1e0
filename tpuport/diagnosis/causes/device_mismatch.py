"""Arrays of one computation lie on different devices."""

import re

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded

_PROBLEM = "the arguments of one computation lie on different devices"
_ARGUMENT = re.compile(
    r"argument (\S+) of (.+?) with shape (\S+) and with device ids (\[[\d, ]*\]) on platform (\w+)"
)


class DeviceMismatch(Cause):
    """The arguments of one computation lie on different devices.

    jax moves only arrays that nobody put anywhere. One that was placed (`jax.device_put`, a
    `NamedSharding`, the result of a sharded step) stays, so batch and parameters need one mesh.
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
        """Which argument is where."""
        if not raised.says("incompatible devices"):
            return None
        found = _ARGUMENT.findall(raised.message)
        return Explanation(
            _PROBLEM,
            (
                "put them onto one mesh: jax.device_put(x, NamedSharding(mesh, P())) for what every"
                " chip needs, P('data') for the batch",
                "or leave the small ones where they are made: an array that nobody placed goes"
                " where the others are",
            ),
            None,
            tuple(
                f"{name} {shape} on {platform} {devices}"
                for name, _, shape, devices, platform in found
            ),
        )
