"""Over which devices a run trains: those of one process, or of several that share the work."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from torch import nn

import tpuport
from recipes import hosts
from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel
from tpuport.training import initialize

RULES = ("fsdp", "ddp")


@dataclass(frozen=True)
class Devices:
    """The devices of a run. Batches, and with "fsdp" weights and states, are spread over them.

    Attributes:
        mesh: Sizes by mesh axis, such as {"fsdp": 8}; None for one device.
        rules: "fsdp", or "ddp", which keeps all weights on every device.
    """

    mesh: Mapping[str, int] | None = None
    rules: str = "fsdp"

    def join(self, given: Mapping[str, Any]) -> None:
        """Join the other processes, if there are any.

        Args:
            given: What all of them must have been given, by name.

        Raises:
            UsageError: There are no such rules, or processes would have no part or another part.
        """
        if self.rules not in RULES:
            raise UsageError(f"rules={self.rules!r}: expected {' or '.join(RULES)}")
        initialize()
        if self.mesh is None:
            hosts.check_covers("no mesh", 1, "--mesh fsdp=-1, which is over the devices of all")
        hosts.check_same({"devices": [self.mesh, self.rules], **given})

    def place(self, ported: PortedModel) -> None:
        """Shard a ported model over the devices."""
        if self.mesh is not None:
            tpuport.shard(ported, self.mesh, self.rules)


def on_one(weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return weights of one process as arrays of one device."""
    first = jax.local_devices()[0]
    return {name: jax.device_put(value, first) for name, value in weights.items()}


def trained(ported: PortedModel) -> nn.Module:
    """Return the module of a port with its weights, gathered from all processes."""
    return hosts.gather(ported).to_torch()


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file of weights, by the first process alone."""
    if jax.process_index() == 0:
        tpuport.save_checkpoint(path, values)
