"""Links between neighbours, and collectives over all devices, against the cost model's times."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.cost import Collective, collective_seconds
from tpuport.measurement.bench import Bench
from tpuport.measurement.records import Quantity, Result
from tpuport.reports import wording as fmt

AXIS = "devices"
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
# With more than this each link would take the time of all others.
_MOST_LINKS = 24


def links(bench: Bench) -> Iterator[Result]:
    """Measure each link by sending both ways over it, and nothing over the others."""
    if bench.device.count == 1:
        return
    size = bench.size(1 << 24, 1 << 10)
    expected = None if bench.chip is None else bench.chip.ici_link_bandwidth
    for one, other in neighbours(bench.devices)[:_MOST_LINKS]:
        pairs = [(one, other), (other, one)]
        sent = functools.partial(lax.ppermute, axis_name=AXIS, perm=pairs)
        seconds = _spread_seconds(bench, lambda x, sent=sent: sent(x) + 1, size)
        name = f"link {_place(bench.devices[one])} - {_place(bench.devices[other])}"
        words = f"{fmt.size(4 * size)} each way"
        yield Result("links", name, Quantity.RATE, 4 * size / seconds, "B/s", expected, words)


def neighbours(devices: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Return the pairs of devices with a link: one step apart by their coordinates.

    Devices without coordinates are taken for a ring.
    """
    places: list[Any] = [getattr(one, "coords", None) for one in devices]
    if any(place is None for place in places):
        count = len(devices)
        return [(i, (i + 1) % count) for i in range(count if count > 2 else 1)]
    return [
        (i, j)
        for i, here in enumerate(places)
        for j, there in enumerate(places)
        if i < j and sum(abs(a - b) for a, b in zip(here, there, strict=True)) == 1
    ]


def _place(device: Any) -> str:
    coords = getattr(device, "coords", None)
    return f"{device.id}" if coords is None else f"{device.id} {tuple(coords)}"


def collectives(bench: Bench) -> Iterator[Result]:
    """Measure large collectives over all devices against `collective_seconds`, and a small one."""
    count = bench.device.count
    if count == 1:
        return
    size = bench.size(1 << 24, 1 << 10) // count * count
    for kind in _COLLECTIVES:
        seconds = _spread_seconds(bench, functools.partial(_step_of, kind, count), size)
        num_bytes = 4 * size * (count if kind in ("all-gather", "reduce-scatter") else 1)
        collective = Collective(kind, "", num_bytes, count)
        expected = None if bench.chip is None else collective_seconds(bench.chip, collective)
        words = f"{fmt.size(num_bytes)} over {count} devices"
        yield Result(
            *("collectives", kind, Quantity.SECONDS, seconds, "s", expected, words),
            feeds="ici_link_bandwidth",
        )
    seconds = _spread_seconds(bench, functools.partial(_step_of, "all-reduce", count), count)
    words = f"{4 * count} bytes: the time that each collective takes at least"
    yield Result("collectives", "all-reduce, tiny", Quantity.SECONDS, seconds, "s", None, words)


def _step_of(kind: str, count: int, x: jax.Array) -> jax.Array:
    """Run one collective on a device's part (size,), and return an array of the same shape.

    The barrier keeps XLA from merging what follows a collective with it.
    """
    size = x.shape[0]
    if kind == "all-reduce":
        return lax.psum(x, AXIS) / count
    if kind == "all-to-all":
        return lax.all_to_all(x, AXIS, 0, 0, tiled=True) + 1
    if kind == "all-gather":
        whole = lax.optimization_barrier(lax.all_gather(x, AXIS, tiled=True))
        return whole[:size] + 1
    whole = lax.optimization_barrier(jnp.tile(x, count))
    return lax.psum_scatter(whole, AXIS, tiled=True) / count


def _spread_seconds(bench: Bench, step: Any, size: int) -> float:
    """Return the time of a step on float32 arrays of `size` elements a device."""
    mesh = Mesh(np.array(bench.devices), (AXIS,))
    spread = jax.shard_map(step, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    sharding = NamedSharding(mesh, P(AXIS))
    x = jax.jit(lambda: jnp.ones(size * bench.device.count, jnp.float32), out_shardings=sharding)()
    return bench.seconds(spread, x)
