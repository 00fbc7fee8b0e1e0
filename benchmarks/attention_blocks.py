"""`python -m benchmarks.attention_blocks`: block sizes of splash attention, by schedule length.

Each kernel is one ahead-of-time compile by libtpu, which takes 5 to 40 s and no TPU. Results are
written after each case, and cases that are in the table are not compiled again, so the run can be
stopped and continued at will. Figures are for one head of self-attention over `SEQUENCE` tokens.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from tpuport.cost import CHIPS, Chip, KernelCompileError, KernelSchedule, chip_of
from tpuport.cost.kernels import KernelCall, find_calls
from tpuport.cost.schedule import schedule_call
from tpuport.kernels.attention.kernel_case import KINDS, KernelCase, build_kernel
from tpuport.kernels.attention.options import BlockSizes

TABLE = Path(__file__).parent.parent / "tpuport" / "kernels" / "attention" / "block_table.json"
DOCS = Path(__file__).parent.parent / "docs"

# A multiple of every block size below.
SEQUENCE = 49152
FORWARD = (
    (3072, 2048, 1024), (2048, 2048, 1024), (2048, 2048, 512), (1024, 2048, 1024),
    (1024, 1024, 1024), (1024, 1024, 512), (512, 1024, 512),
)  # fmt: skip
BACKWARD = ((2048, 1024), (1024, 2048), (1024, 1024), (1024, 512), (512, 1024), (512, 512))
# The fields that select an entry, besides its blocks.
KEY = ("chip", "head_dim", "dtype", "mask")
_FORWARD_KEY = (*KEY, "block_q", "block_kv", "block_kv_compute")
_BACKWARD_KEY = (*KEY[:3], "block_q_backward", "block_kv_backward")


@dataclass
class Table:
    """The file of results, and for this run only the cases that were too large to compile."""

    path: Path
    entries: list[dict[str, Any]] = field(default_factory=list)
    backward: list[dict[str, Any]] = field(default_factory=list)
    refused: set[tuple[Any, ...]] = field(default_factory=set)

    @classmethod
    def load(cls, path: Path) -> "Table":
        """Return the table in a file, or an empty one."""
        entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        return cls(path, entries)

    def save(self) -> None:
        """Write the table, one entry per line in a fixed order, with the best backward blocks."""
        for entry in self.entries:
            same = [b for b in self.backward if all(b[n] == entry[n] for n in KEY[:3])]
            if same:
                best = max(same, key=lambda found: found["share_of_ceiling_backward"])
                entry.update({n: v for n, v in best.items() if n.endswith("_backward")})
        self.entries.sort(key=lambda entry: tuple(entry[name] for name in _FORWARD_KEY))
        lines = ",\n".join(json.dumps(entry) for entry in self.entries)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        temporary.replace(self.path)

    def has(self, key: tuple[Any, ...]) -> bool:
        """Return whether a forward case is in the table, or was refused."""
        known = (tuple(entry[name] for name in _FORWARD_KEY) for entry in self.entries)
        return key in self.refused or key in known


class Schedules:
    """A cache of kernel schedules. Blocks without masking are the same under every mask."""

    def __init__(self) -> None:
        self._found: dict[Any, KernelSchedule] = {}

    def of(self, call: KernelCall, chip: str, kind: tuple[Any, ...]) -> KernelSchedule:
        """Return the schedule of a call; `kind` is the key that determines its body."""
        if kind not in self._found:
            self._found[kind] = schedule_call(call, chip)
        return self._found[kind]


def measure_forward(case: KernelCase, schedules: Schedules) -> float:
    """Return the seconds of one head: its kernels, and the traffic to merge their results.

    Raises:
        KernelCompileError: Usually it does not fit the chip's on-chip memory.
    """
    built = build_kernel(case)
    calls = find_calls(jax.make_jaxpr(built.function)(*built.args))
    # A masking kernel also reads positions or ids, besides its schedule (two arrays), q, k and v.
    masking = [len(call.args) > 5 for call in calls]
    if masking != [steps.masked for steps in built.calls]:
        raise ValueError(f"{case} makes calls that mask: {masking}, not those of {built.calls}")
    chip = chip_of(case.chip)
    seconds = 0.0
    for call, steps in zip(calls, built.calls, strict=True):
        masked = case.mask if steps.masked else "nothing"
        kind = (case.chip, case.head_dim, case.dtype, built.blocks, masked)
        found = schedules.of(call, case.chip, kind)
        seconds += _seconds(found, call, steps.active, case.head_dim, steps.runs)
    merges = sum(steps.runs for steps in built.calls) - 1
    if merges > 0:
        moved = merges * 3 * case.num_queries * (case.head_dim * jnp.dtype(case.dtype).itemsize + 4)
        seconds += moved / chip.hbm_bandwidth
    return seconds


def _seconds(
    found: KernelSchedule, call: KernelCall, active: int, head_dim: int, runs: int = 1
) -> float:
    """Return the seconds of `runs` calls with this grid, from a schedule of another grid."""
    chip = found.chip
    if not runs:
        return 0.0
    steps = runs * call.steps
    cores = chip.cores if found.parallel else 1
    cycles = found.cycles_a_step(active / steps, row_steps=call.grid[-1])
    peak = chip.bf16_flops * cores / chip.cores * chip.attention_fill(head_dim)
    products = active * call.products / call.steps / peak
    transfer = active * call.step_bytes / chip.hbm_bandwidth
    return max(steps / cores * cycles / chip.clock_hz, products, transfer)


def backward_calls(head_dim: int, dtype: str, block_q: int, block_kv: int) -> list[KernelCall]:
    """Return JAX's kernels for the gradients of queries and of keys, without a mask."""
    blocks = splash.BlockSizes(
        block_q=512,
        block_kv=512,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=min(block_kv, 1024),
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    mask = masks.MultiHeadMask([masks.FullMask((SEQUENCE, SEQUENCE))])
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=blocks)
    x = jax.ShapeDtypeStruct((1, SEQUENCE, head_dim), jnp.dtype(dtype))

    def loss(q: Any, k: Any, v: Any) -> Any:
        out: Any = kernel(q, k, v)
        return out.astype(jnp.float32).sum()

    calls = find_calls(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x))
    return [call for call in calls if "fwd" not in call.name]


def measure_backward(chip: str, head_dim: int, dtype: str, sizes: tuple[int, int]) -> float:
    """Return the seconds of both kernels for one head.

    Raises:
        KernelCompileError: See `measure_forward`.
    """
    total = 0.0
    for call in backward_calls(head_dim, dtype, *sizes):
        found = schedule_call(call, chip)
        total += _seconds(found, call, found.steps, head_dim)
    return total


def _shares(flops: float, seconds: float, chip: Chip, head_dim: int, suffix: str) -> dict[str, Any]:
    share = flops / seconds / chip.bf16_flops
    return {
        f"seconds{suffix}": float(f"{seconds:.4g}"),
        f"share_of_peak{suffix}": round(share, 4),
        f"share_of_ceiling{suffix}": round(share / chip.attention_fill(head_dim), 4),
    }


def forward_cases(options: argparse.Namespace) -> Iterator[KernelCase]:
    """Yield every forward case, in the order of the arguments."""
    for chip, dim, dtype, blocks, kind in itertools.product(
        options.chips, options.head_dims, options.dtypes, options.blocks or FORWARD, options.masks
    ):
        yield KernelCase(chip, 1, SEQUENCE, SEQUENCE, dim, dtype, kind, BlockSizes(*blocks))


def tune_forward(table: Table, options: argparse.Namespace, stop: float) -> None:
    """Compile the forward cases that are missing until the time is up."""
    schedules = Schedules()
    for case in forward_cases(options):
        assert case.blocks is not None
        sizes = (case.blocks.q, case.blocks.kv, case.blocks.kv_compute)
        key = (case.chip, case.head_dim, case.dtype, case.mask, *sizes)
        if time.monotonic() > stop:
            return
        if table.has(key):
            continue
        start = time.monotonic()
        try:
            seconds = measure_forward(case, schedules)
        except KernelCompileError as error:
            table.refused.add(key)
            print(key, error, flush=True)
            continue
        shares = _shares(build_kernel(case).flops, seconds, chip_of(case.chip), case.head_dim, "")
        table.entries.append({**dict(zip(_FORWARD_KEY, key, strict=True)), **shares})
        print(key, shares, f"{time.monotonic() - start:.0f} s", flush=True)
        table.save()


def tune_backward(table: Table, options: argparse.Namespace, stop: float) -> None:
    """Compile the backward kernels until the time is up, and put their best into the entries."""
    for chip, dim, dtype, sizes in itertools.product(
        options.chips, options.head_dims, options.dtypes, options.blocks or BACKWARD
    ):
        if time.monotonic() > stop:
            return
        key = (chip, dim, dtype, *sizes)
        try:
            seconds = measure_backward(chip, dim, dtype, sizes)
        except KernelCompileError as error:
            print(key, error, flush=True)
            continue
        # Five products. The products that both kernels recompute are not useful work.
        flops = 10 * dim * float(SEQUENCE) ** 2
        shares = _shares(flops, seconds, chip_of(chip), dim, "_backward")
        table.backward.append({**dict(zip(_BACKWARD_KEY, key, strict=True)), **shares})
        print(key, shares, flush=True)
        table.save()


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def main() -> None:
    """Compile missing cases while time allows, and write the table and the page of docs/."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_blocks", description=__doc__
    )
    parser.add_argument("--chips", nargs="+", default=["v6e", "v5e", "v5p"], choices=list(CHIPS))
    parser.add_argument("--head-dims", nargs="+", type=int, default=[128, 64, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--masks", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument(
        "--blocks", nargs="+", type=_sizes, help="only these block sizes: 2048,2048,1024"
    )
    parser.add_argument(
        "--minutes", type=float, default=60, help="start no compile after this time"
    )
    parser.add_argument("--backward", action="store_true", help="the backward kernels instead")
    parser.add_argument("--page", action="store_true", help="only write the page of docs/")
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args()
    table = Table.load(options.out)
    if not options.page:
        tune = tune_backward if options.backward else tune_forward
        tune(table, options, time.monotonic() + 60 * options.minutes)
    if options.out == TABLE:
        from benchmarks.attention_blocks_page import write

        write(table.entries, DOCS)


if __name__ == "__main__":
    main()
