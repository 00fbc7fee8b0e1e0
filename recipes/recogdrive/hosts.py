"""A stage on several processes: all of them compute, and the first one writes what is read later.

Each is given the same command, by torchrun, Slurm or a TPU slice. Arrays are in parts on the
chips of all processes, so what a file needs is gathered by all of them together.
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
from tpuport.errors import UsageError
from tpuport.model.ported import PortedModel
from tpuport.training import initialize


def refuse_several(what: str, why: str) -> None:
    """Refuse a run of several processes, which would each do all of it and write the same files.

    Args:
        what: is for one process.
        why: it is.

    Raises:
        UsageError: there are several.
    """
    initialize()
    if jax.process_count() > 1:
        raise UsageError(
            f"{what} is for one process, {why}: there are {jax.process_count()}. What to do: start"
            " one"
        )


def check_covers(flag: str, num_devices: int, what_to_do: str) -> None:
    """Refuse to train on a part of the devices of several processes.

    Args:
        flag: what was said of devices.
        num_devices: that it comes to.
        what_to_do: the advice of the error.

    Raises:
        UsageError: another process would have no part in it.
    """
    if jax.process_count() > 1 and num_devices != jax.device_count():
        raise UsageError(
            f"{flag}: there are {jax.process_count()} processes with {jax.device_count()} devices,"
            f" and training is over all of them or of one process. What to do: {what_to_do}"
        )


def check_same(of_run: Mapping[str, Any]) -> None:
    """Refuse processes that were given different things to do, which would wait for ever or, worse,
    train on other samples than they say. All of them have to call it.

    Args:
        of_run: what has to be the same on all of them, by name; its text is compared.

    Raises:
        UsageError: on every process, if something differs between any.
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
    """What a ported model gave, whole, on every process; all of them have to call it."""
    if jax.process_count() == 1:
        return tpuport.to_torch(output)
    return torch.from_numpy(np.array(process_allgather(output.jax(), tiled=True)))


def gather(ported: PortedModel) -> PortedModel:
    """Give a model its whole values on the host, to be written; all processes have to call it.

    It cannot be called afterwards.
    """
    if jax.process_count() > 1:
        for values in (ported.params, ported.buffers):
            for name, value in values.items():
                # One after another: no chip has room for all of it.
                values[name] = process_allgather(value, tiled=True)
    return ported
