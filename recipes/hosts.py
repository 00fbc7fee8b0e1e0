"""A stage on several processes: all of them compute, and the first one writes the results.

Each is started with the same command, by torchrun, Slurm or a TPU slice. Arrays are sharded over
the chips of all processes, so all of them together gather what a file needs.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental.multihost_utils import process_allgather

import tpuport
from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel
from tpuport.training import initialize


def refuse_several(what: str, why: str) -> None:
    """Raise an error for several processes, which would all write the same files.

    Args:
        what: The feature that needs one process.
        why: The reason.

    Raises:
        UsageError: There are several.
    """
    initialize()
    if jax.process_count() > 1:
        raise UsageError(
            f"{what} is for one process, {why}: there are {jax.process_count()}. What to do: start"
            " one"
        )


def check_covers(flag: str, num_devices: int, what_to_do: str) -> None:
    """Raise an error if training would use only some devices of several processes.

    Args:
        flag: The setting of devices, for the message.
        num_devices: The number of devices that it results in.
        what_to_do: Advice in the error.

    Raises:
        UsageError: Another process would have no part in it.
    """
    if jax.process_count() > 1 and num_devices != jax.device_count():
        raise UsageError(
            f"{flag}: there are {jax.process_count()} processes with {jax.device_count()} devices,"
            f" and training is over all of them or of one process. What to do: {what_to_do}"
        )


def check_same(of_run: Mapping[str, Any]) -> None:
    """Raise an error if processes were given different work. All of them have to call it.

    They would wait for ever or, worse, train on other samples than they say.

    Args:
        of_run: Values that must be the same on all processes, by name. Their JSON is compared.

    Raises:
        UsageError: On every process, if any of them differs.
    """
    if jax.process_count() == 1:
        return
    texts = [json.dumps(value, default=repr) for value in of_run.values()]
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    mine = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), -1)
    every = np.asarray(process_allgather(mine))
    different = (every != every[:1]).any(axis=(0, 2))
    names = [name for name, differs in zip(of_run, different, strict=True) if differs]
    if names:
        raise UsageError(
            f"{' and '.join(names)} are not the same on all {jax.process_count()} processes. What"
            " to do: give each the same command, and folders that all of them see"
        )


def to_torch(output: Any) -> torch.Tensor:
    """Return a ported model's output, gathered on every process. All of them have to call it."""
    if jax.process_count() == 1:
        return tpuport.to_torch(output)
    return torch.from_numpy(np.array(process_allgather(output.jax(), tiled=True)))


def gather(ported: PortedModel) -> PortedModel:
    """Gather a model's values on the host, to be written. All processes have to call it.

    The model cannot be called afterwards.
    """
    if jax.process_count() > 1:
        for values in (ported.params, ported.buffers):
            for name, value in values.items():
                # One after another, since no chip has memory for all of them unsharded.
                values[name] = process_allgather(value, tiled=True)
    return ported
