"""`python -m benchmarks.attention_dropout`: dropout drawn in the kernel against the scores' matrix.

Value and gradients of one attention without a mask, compiled for chips that are not there. The
time of the matrix is XLA's own estimate for its schedule; that of the kernels is libtpu's schedule,
and XLA's estimate for what is left around them. No TPU is needed; a case takes half a minute.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from tpuport.cost import chip_of
from tpuport.cost.compiled_cost import read_compiled
from tpuport.cost.kernels import find_calls
from tpuport.cost.schedule import schedule_call
from tpuport.kernels.attention import AttentionOptions, attend, flash
from tpuport.sharding.topology import describe
from tpuport.tracing.lowerings.attention import attention

PAGE = Path(__file__).parent.parent / "docs" / "attention_dropout.md"
CHIPS, DTYPES = ("v5e", "v6e"), ("bfloat16", "float32")
# Batch, heads, sequence, size of a head.
SHAPES = ((64, 12, 128, 64), (64, 12, 197, 64), (16, 12, 512, 64), (4, 8, 2048, 64))
RATE = 0.1
# The page is written by hand up to these lines, and the rows below by this program.
HEAD = (
    "| chip | dtype | batch, heads, sequence, size | matrix, ms | kernels | around them | forward "
    "| backward | drawn again | matrix, MiB | kernel, MiB |\n" + "|---" * 11 + "|\n"
)


def gradients(chip: str, *, by_kernel: bool) -> Any:
    """Return a function of q, k, v, a key's words and the output's gradient."""
    options = AttentionOptions(platform="tpu", chip=chip)

    def one(q: Any, k: Any, v: Any, key: Any) -> jax.Array:
        if by_kernel:
            return attend(q, k, v, dropout=RATE, key=key, options=options)
        typed = jax.random.wrap_key_data(key)
        return attention(q, k, v, dropout=RATE, dropout_key=typed)

    def run(q: Any, k: Any, v: Any, key: Any, grad: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: one(q, k, v, key), q, k, v)
        return out, pull(grad)

    return run


def compile_alone(function: Any, args: list[Any], chip: str) -> tuple[float, float]:
    """Return the milliseconds outside of kernels, and the MiB of temporaries."""
    where = SingleDeviceSharding(describe(f"{chip}-1")[0])
    placed = [jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=where) for arg in args]
    program: Any = jax.jit(function).lower(*placed).compile()
    cycles = read_compiled(program.as_text()).estimated_cycles
    temporaries = program.memory_analysis().temp_size_in_bytes
    return 1e3 * cycles / chip_of(chip).clock_hz, temporaries / 2**20


def time_kernels(function: Any, args: list[Any], chip: str) -> list[float]:
    """Return the milliseconds of the forward and the backward kernel."""
    calls = find_calls(jax.make_jaxpr(function)(*args))
    return [1e3 * schedule_call(call, chip).seconds() for call in calls]


def measure(chip: str, dtype: str, shape: tuple[int, ...]) -> str:
    """Return one row of the table."""
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    args = [x, x, x, jax.ShapeDtypeStruct((2,), jnp.uint32), x]
    matrix, matrix_memory = compile_alone(gradients(chip, by_kernel=False), args, chip)
    around, memory = compile_alone(gradients(chip, by_kernel=True), args, chip)
    forward, backward = time_kernels(gradients(chip, by_kernel=True), args, chip)
    with mock.patch.object(flash, "_MOST_KEPT", 0):
        again = time_kernels(gradients(chip, by_kernel=True), args, chip)[1]
    sizes = ", ".join(map(str, shape))
    times = (matrix, forward + backward + around, around, forward, backward, again)
    cells = [f"{time:.2f}" for time in times] + [f"{matrix_memory:.0f}", f"{memory:.0f}"]
    return f"| {chip} | {dtype} | {sizes} | {' | '.join(cells)} |\n"


def _case(row: str) -> tuple[str, str, int]:
    """Return chip, dtype and sequence of a row, by which the table is sorted."""
    _, chip, dtype, sizes, *_ = (cell.strip() for cell in row.split("|"))
    return chip, dtype, int(sizes.split(",")[2])


def main() -> None:
    """Measure the cases, and put their rows into the table at the end of the page of docs/."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_dropout", description=__doc__
    )
    parser.add_argument("--chips", nargs="+", default=list(CHIPS), choices=CHIPS)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    options = parser.parse_args()
    written, _, table = PAGE.read_text(encoding="utf-8").partition(HEAD)
    rows = {_case(row): row for row in table.splitlines(keepends=True)}
    for case in itertools.product(options.chips, options.dtypes, SHAPES):
        row = measure(*case)
        print(row, end="", flush=True)
        rows[_case(row)] = row
        PAGE.write_text(written + HEAD + "".join(rows[c] for c in sorted(rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
