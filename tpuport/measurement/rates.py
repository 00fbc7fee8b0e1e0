"""Matrix products, memory, and what it takes to start a program."""

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuport.cost.estimate import DENSE_EFFICIENCY
from tpuport.measurement.bench import Bench
from tpuport.measurement.records import Quantity, Result
from tpuport.reports import wording as fmt

_SMALL = 128
_CALLS = 50
_COPIES = 4
# Products of bf16 that a TPU makes of one of float32 (`Chip.peak`).
_EXACT_PASSES = 6


def products(bench: Bench) -> Iterator[Result]:
    """Measure products of large and of narrow matrices against peak times `Chip.fill`."""
    large = bench.size(8192, _SMALL)
    for dtype, inner, precision in (
        ("bfloat16", large, None),
        ("bfloat16", bench.size(128, 32), None),
        ("float32", large, None),
        ("float32", large, "highest"),
        ("int8", large, None),
    ):
        yield _product(bench, dtype, large, inner, precision)


def _product(bench: Bench, dtype: str, size: int, inner: int, precision: str | None) -> Result:
    """Measure two products in turn, (size, inner) by (inner, size) by (size, inner)."""
    is_int, is_exact = dtype == "int8", precision == "highest"
    accumulate = jnp.int32 if is_int else jnp.float32

    def step(x: Any, wide: Any, narrow: Any) -> Any:
        between = jnp.dot(x, wide, preferred_element_type=accumulate).astype(x.dtype)
        return jnp.dot(between, narrow, preferred_element_type=accumulate).astype(x.dtype)

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((size, inner), (inner, size), (size, inner))
    x, wide, narrow = (_drawn(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    with jax.default_matmul_precision(precision):
        rate = 4 * size * size * inner / bench.seconds(step, x, wide, narrow)
    words = f"{size} x {inner} by {inner} x {size}, and back"
    name = f"product, {dtype}" + ("" if inner == size else ", narrow")
    if dtype == "float32":
        # jax rounds the operands to bf16 on a TPU and to TF32 on a GPU, and tpuport does not.
        name += ", as tpuport computes" if is_exact else ", operands rounded"
    expected = None
    if bench.chip is not None:
        fill = bench.chip.fill(inner, size)
        passes = _EXACT_PASSES if is_exact else 1
        expected = bench.chip.peak(dtype, dtype) / passes * fill * DENSE_EFFICIENCY
        words += f"; the model: {DENSE_EFFICIENCY:.1%} of the peak"
        words += f" in {passes} passes" if is_exact else ""
        words += "" if fill == 1 else f", of which {fill:.0%} can be filled"
    feeds = {"bfloat16": "dense_efficiency", "int8": "int8_ops"}.get(dtype, "")
    unit = "op/s" if is_int else "FLOP/s"
    return Result(
        *("products", name, Quantity.RATE, rate, unit, expected, words),
        feeds=feeds if inner == size else "",
    )


def _drawn(key: Any, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Draw a matrix whose products stay about as large as it is."""
    if dtype == "int8":
        return jax.random.randint(key, shape, -8, 8, jnp.int8)
    return (jax.random.normal(key, shape, jnp.float32) / shape[0] ** 0.5).astype(dtype)


def memory(bench: Bench) -> Iterator[Result]:
    """Measure reading and writing a large array against the bandwidth of the HBM."""
    elements = bench.size(1 << 28, 1 << 16)
    x = jnp.ones((elements // 1024, 1024), jnp.float32)
    expected = None if bench.chip is None else bench.chip.hbm_bandwidth
    words = f"{fmt.size(x.nbytes)} read and written"
    rate = 2 * x.nbytes / bench.seconds(lambda x: x * 0.5 + 1, x)
    yield Result(
        *("memory", "read and write", Quantity.RATE, rate, "B/s", expected, words),
        feeds="hbm_bandwidth",
    )

    def reading(total: Any, x: Any) -> Any:
        # The sum depends on the one before, so that no pass over the array is left out.
        return jnp.sum(x * (1 + total * 1e-30), dtype=jnp.float32)

    rate = x.nbytes / bench.seconds(reading, jnp.float32(0), x)
    words = f"{fmt.size(x.nbytes)} summed"
    yield Result("memory", "read", Quantity.RATE, rate, "B/s", expected, words)


def host(bench: Bench) -> Iterator[Result]:
    """Measure what passes between host and device, and the start of a program."""
    array = np.ones(bench.size(1 << 26, 1 << 16), np.float32)
    device = bench.devices[0]

    def best(function: Any) -> float:
        def took() -> float:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start

        return min(took() for _ in range(_COPIES))

    words = f"{fmt.size(array.nbytes)}"
    put = best(lambda: jax.block_until_ready(jax.device_put(array, device)))
    yield Result("host", "host to device", Quantity.RATE, array.nbytes / put, "B/s", None, words)
    there = jax.device_put(array, device)
    add = jax.jit(lambda x, y: x + y)
    # A fresh array each time: an array keeps what was once copied to the host.
    fresh = iter(jax.block_until_ready([there + n for n in range(_COPIES)]))
    get = best(lambda: np.asarray(next(fresh)))
    yield Result("host", "device to host", Quantity.RATE, array.nbytes / get, "B/s", None, words)
    one = jax.device_put(np.float32(1), device)

    def calls() -> None:
        x = one
        for _ in range(_CALLS):
            x = add(x, one)
        jax.block_until_ready(x)

    calls()
    words = f"{_CALLS} in a row"
    yield Result(
        "host", "starting a program", Quantity.SECONDS, best(calls) / _CALLS, "s", None, words
    )
