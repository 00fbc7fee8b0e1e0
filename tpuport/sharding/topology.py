"""TPU slices by name, described by libtpu on a machine that has none.

Names are Cloud TPU's. Those of v5p count TensorCores, two a chip, so `v5p-8` is 4 chips; those of
v5e and v6e count chips. A mesh device is always a chip. Source: cloud.google.com/tpu/docs/v5p, v5e
and v6e, "Configurations".
"""

import contextlib
import difflib
import importlib.util
import math
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from tpuport.foundation.errors import MissingExtraError, UsageError

_FLAT = {
    1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16",
}  # fmt: skip
_V5P = {
    8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8",
    1024: "8x8x8", 2048: "8x8x16", 4096: "8x16x16", 8192: "16x16x16", 12288: "16x16x24",
}  # fmt: skip

# Cloud TPU's name of a slice -> libtpu's.
TOPOLOGIES: dict[str, str] = {
    **{f"v5e-{num}": f"v5e:{shape}" for num, shape in _FLAT.items()},
    **{f"v5p-{num}": f"v5p:{shape}" for num, shape in _V5P.items()},
    **{f"v6e-{num}": f"v6e:{shape}" for num, shape in _FLAT.items()},
}
_ALIASES = {"v5litepod": "v5e", "v6litepod": "v6e", "trillium": "v6e"}
_SHAPES = {"v5e": 2, "v5p": 3, "v6e": 2}

# libtpu reads these when it is loaded: ask no metadata server, let two processes load it, and log
# nothing about this machine's chip (any name does: each call names its topology).
_QUIET = {
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Topology:
    """A slice: Cloud TPU's name if it has one, libtpu's name, and the number of chips."""

    name: str
    libtpu_name: str
    num_chips: int


def find_topology(name: str) -> Topology:
    """Look up a slice: `v6e-8`, `v5p-16`, `v5litepod-4`, or libtpu's own name like `v6e:2x4`.

    Raises:
        UsageError: the slice is unknown.
    """
    family, dash, rest = name.strip().lower().partition("-")
    known = f"{_ALIASES.get(family, family)}{dash}{rest}"
    libtpu = TOPOLOGIES.get(known, known)
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", libtpu)
    if match and len(sizes := match[2].split("x")) == _SHAPES.get(match[1]):
        chips = math.prod(map(int, sizes))
        if chips:
            return Topology(known, libtpu, chips)
    of_family = [n for n in TOPOLOGIES if n.startswith(f"{known.partition('-')[0]}-")]
    near = of_family or difflib.get_close_matches(known, TOPOLOGIES, 3) or ["v5e-8", "v6e-8"]
    raise UsageError(
        f"There is no TPU topology {name!r}. What to do: name one such as {', '.join(near)}, or"
        " give its shape as in 'v6e:2x4' (v5p names count cores: v5p-8 is 4 chips)"
    )


def describe(name: str, num_slices: int = 1) -> list[Any]:
    """Return the chips of a slice that need not be present, to lower and compile for.

    Args:
        name: name of the slice, as for `find_topology`.
        num_slices: number of such slices, joined by the data centre's network.

    Raises:
        UsageError: the topology is unknown.
        MissingExtraError: libtpu is not installed.
    """
    topology = find_topology(name)
    if importlib.util.find_spec("libtpu") is None:
        raise MissingExtraError(f"the topology {name!r}", "libtpu", "tpu")
    options: dict[str, Any] = {"num_slices": num_slices} if num_slices > 1 else {}
    if topology.num_chips == 1:
        # libtpu's default is hosts of four chips.
        options["chips_per_host_bounds"] = [1, 1, 1]
    with _quiet_libtpu():
        try:
            found = topologies.get_topology_desc(
                platform="tpu", topology_name=topology.libtpu_name, **options
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UsageError(f"libtpu cannot describe {name!r}: {reason}") from error
    return list(found.devices)


def is_described(device: Any) -> bool:
    """Return whether a device belongs to a described topology: it can only be compiled for."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


@contextlib.contextmanager
def _quiet_libtpu() -> Iterator[None]:
    """Set the environment that libtpu needs while it is loaded on a machine without a TPU."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if "tpu" in str(platforms or "").split(","):
        yield
        return
    with _LOCK:
        added = [name for name in _QUIET if name not in os.environ]
        os.environ.update({name: _QUIET[name] for name in added})
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)
