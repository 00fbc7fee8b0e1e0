"""Joining the processes of a run: the same script on one or on many."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.platforms import has_tpu_device

_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
# Clusters that JAX detects by itself, with the variable of the number of processes.
_CLUSTERS = {"Slurm": "SLURM_NTASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}


@dataclass(frozen=True)
class Hosts:
    """The processes of a run.

    Attributes:
        process: the index of this process, from 0.
        count: the number of processes.
        found: the source of these numbers, such as "torchrun" or "one process".
    """

    process: int
    count: int
    found: str

    @property
    def is_first(self) -> bool:
        """Return whether this is the process that writes logs and files."""
        return self.process == 0


@dataclass(frozen=True)
class _Found:
    """Arguments for joining the processes; None for values that JAX detects."""

    by: str
    coordinator: str | None = None
    count: int | None = None
    process: int | None = None


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process: int | None = None,
    *,
    timeout: int = 300,
) -> Hosts:
    """Join this process to the others of the run, if there are others; call it before all else.

    They are found from the arguments; JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID; torchrun's MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK; Slurm or Open MPI; or
    the TPU slice (queued resources, GKE), in this order. Without any of these it is one
    process, and nothing happens. A second call does nothing.

    Args:
        coordinator: "host:port" of the first process.
        num_processes: the number of processes of the run.
        process: the index of this process, from 0.
        timeout: seconds to wait for the others.

    Raises:
        UsageError: some of these are set and some are not, one is no number, or devices were asked
            for already.
    """
    found = _find(os.environ, (coordinator, num_processes, process))
    if jax.distributed.is_initialized():
        return Hosts(jax.process_index(), jax.process_count(), "joined before")
    if found is None:
        return Hosts(0, 1, "one process")
    from jax._src import xla_bridge  # there is no public way to ask

    if xla_bridge.backends_are_initialized():
        raise UsageError(
            f"initialize: {found.by} says that there are other processes, and this one has asked"
            " for its devices already, alone. What to do: call initialize() before anything that"
            " makes an array or asks for jax.devices()"
        )
    options: dict[str, Any] = {"initialization_timeout": timeout}
    if found.coordinator is not None:
        # Otherwise the variables of a cluster may add devices that do not belong to the run.
        options |= {
            "coordinator_address": found.coordinator,
            "num_processes": found.count,
            "process_id": found.process,
            "cluster_detection_method": "deactivate",
        }
    jax.distributed.initialize(**options)
    return Hosts(jax.process_index(), jax.process_count(), found.by)


def _find(env: Mapping[str, str], given: tuple[Any, Any, Any]) -> _Found | None:
    """Return how to join the processes, or None if this one is alone."""
    names = ("coordinator", "num_processes", "process")
    if any(value is not None for value in given):
        values = _all_set({n: v for n, v in zip(names, given, strict=True) if v is not None}, names)
        return _numbered("the arguments", *(values[name] for name in names))
    if any(env.get(name) for name in _JAX[1:]):
        values = _all_set(env, _JAX)
        return _numbered("JAX_NUM_PROCESSES", *(values[name] for name in _JAX))
    if env.get("RANK") or env.get("WORLD_SIZE"):
        values = _all_set(env, _TORCHRUN)
        port = _number(values["MASTER_PORT"], "MASTER_PORT")
        # torchrun itself listens on MASTER_PORT, so JAX's coordinator takes the next port.
        port += "TORCHELASTIC_RUN_ID" in env
        address = f"{values['MASTER_ADDR']}:{port}"
        return _numbered("torchrun", address, values["WORLD_SIZE"], values["RANK"])
    for cluster, name in _CLUSTERS.items():
        if _number(env.get(name, "1"), name) > 1:
            return _Found(cluster)
    return _Found("the TPU slice") if _in_slice(env) else None


def _all_set(values: Mapping[str, Any], names: tuple[str, ...]) -> Mapping[str, Any]:
    missing = [name for name in names if values.get(name) in (None, "")]
    if missing:
        there = [name for name in names if name not in missing]
        raise UsageError(
            f"initialize: {', '.join(there)} set, and {', '.join(missing)} not. What to do: set all"
            f" of {', '.join(names)} for several processes, or none for one"
        )
    return values


def _numbered(by: str, address: Any, count: Any, process: Any) -> _Found | None:
    number, index = _number(count, by), _number(process, by)
    if not 0 <= index < number:
        raise UsageError(
            f"initialize: process {index} of {number} ({by}): expected a number from 0 up to"
            f" {number - 1}"
        )
    if number == 1:
        return None
    if ":" not in str(address):
        raise UsageError(f"initialize: the coordinator is {address!r} ({by}): expected 'host:port'")
    return _Found(by, str(address), number, index)


def _number(value: Any, name: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"initialize: {name} is {value!r}: expected a whole number") from None


def _in_slice(env: Mapping[str, str]) -> bool:
    """Return whether this is a host of a TPU slice that JAX can ask about its other hosts."""
    if env.get("JAX_PLATFORMS", "").startswith("cpu"):
        return False
    several = "," in env.get("TPU_WORKER_HOSTNAMES", "") or env.get("MEGASCALE_COORDINATOR_ADDRESS")
    if several:
        return True
    return has_tpu_device() and "TPU_SKIP_MDS_QUERY" not in env
