"""A network over all devices of all processes, whose results every process has."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch import nn

import tpuport
from tpuport.sharding import make_mesh

_ROWS = "data"


class Spread:
    """A function of a module over rows, as one program over a mesh.

    Each process calls it as often as the others do, with as many rows. What rows come to depends on
    no other row, so that any number of devices gives the same results, each row once.

    Args:
        module: The module.
        function: The function, called with the module and its arguments; by default `forward`.
        devices: The devices; by default all of all processes.
    """

    def __init__(
        self,
        module: nn.Module,
        function: Callable[..., Any] | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        methods = () if function is None else (function,)
        name = "forward" if function is None else function.__name__
        ported = tpuport.convert(module, methods=("forward", *methods), verify=False)
        mesh = make_mesh({_ROWS: -1}, devices)
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._values = jax.device_put((ported.params, ported.buffers), everywhere)
        own = sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
        self._own, self._count = own, mesh.size // own
        self._rows = NamedSharding(mesh, PartitionSpec(_ROWS))

        def run(weights: Any, valid: Any, *values: Any) -> Any:
            return ported.apply(*weights, None, *values, method=name)[0], valid

        self._run = jax.jit(run, out_shardings=everywhere)

    def __call__(self, valid: np.ndarray, *given: torch.Tensor) -> tuple[Any, np.ndarray]:
        """Return the results of the rows of all processes, and which of them are valid.

        Args:
            valid: Which rows count, (b,). Rows that fill up the devices do not.
            given: The rows of this process, each (b, ...).

        Returns:
            The results as numpy arrays, in the order of processes, and their rows that are valid.
        """
        size = -(-len(valid) // self._own) * self._own
        index = np.arange(size) % len(valid)
        valid = np.asarray(valid, bool)[index] & (np.arange(size) < len(valid))
        values = [self._placed(value) for value in (valid, *(v.numpy()[index] for v in given))]
        found, counted = self._run(self._values, *values)
        return jax.tree.map(np.asarray, found), np.asarray(counted)

    def own(self, found: np.ndarray, count: int) -> torch.Tensor:
        """Return the first results of this process's rows among those of all."""
        size = len(found) // self._count
        start = (jax.process_index() if self._count > 1 else 0) * size
        return torch.from_numpy(found[start : start + count].copy())

    def _placed(self, value: np.ndarray) -> jax.Array:
        whole = (len(value) * self._count, *value.shape[1:])
        return jax.make_array_from_process_local_data(self._rows, value, whole)
