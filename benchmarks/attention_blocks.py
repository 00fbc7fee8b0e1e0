"""`python -m benchmarks.attention_blocks`: block sizes of splash attention, by schedule length.

Each case is one ahead-of-time compile by libtpu, which takes 5 to 40 s and no TPU. Results are
written after each one, and what is in the table already is not compiled again, so it can be stopped
and continued at will.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from tpuport.program.cost import CHIPS, chip_of
from tpuport.program.cost.kernels import KernelCall, find_calls
from tpuport.program.cost.schedule import KernelCompileError, KernelSchedule, schedule_call

TABLE = Path(__file__).parent.parent / "tpuport" / "attention" / "block_table.json"

# What figures are given for: one head of self-attention over so many tokens.
SEQUENCE = 49152
WINDOW = 4096
# Keys that padding takes: the last 1000 or so.
PADDING = 1000
MASKS = ("full", "causal", "padding", "segments", "window")
BLOCKS = (
    (3072, 2048, 1024), (2048, 2048, 1024), (2048, 2048, 512), (1024, 2048, 1024),
    (1024, 1024, 1024), (1024, 1024, 512), (512, 1024, 512), (512, 512, 512),
)  # fmt: skip
_BUILD_BLOCKS = 2


@dataclass(frozen=True)
class Case:
    """One kernel to compile."""

    chip: str
    head_dim: int
    dtype: str
    mask: str
    direction: str
    block_q: int
    block_kv: int
    block_kv_compute: int


class LeftOf(masks._ComputableMask):  # pyright: ignore[reportPrivateUsage]
    """Keys before a fixed one: what static padding leaves."""

    def __init__(self, shape: tuple[int, int], valid: int):
        self.valid = valid
        super().__init__(shape, lambda q, kv: kv < valid)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeftOf) and (self.shape, self.valid) == (other.shape, other.valid)

    def __hash__(self) -> int:
        return hash((type(self), self.shape, self.valid))


def make_mask(kind: str, size_q: int, size_kv: int) -> Any:
    """A mask of splash's for `full`, `causal`, `padding`, `segments` (no mask) or `window`."""
    shape = (size_q, size_kv)
    if kind == "causal":
        return masks.CausalMask(shape)
    if kind == "window":
        return masks.LocalMask(shape, (min(WINDOW, size_kv // 2), 0), 0)
    if kind == "padding":
        return LeftOf(shape, size_kv - min(PADDING, size_kv // 4))
    return masks.FullMask(shape)


def calls_of(case: Case) -> list[KernelCall]:
    """The kernels of one case, over as few blocks as show a whole schedule."""
    size_q = case.block_q * _BUILD_BLOCKS
    size_kv = case.block_kv * _BUILD_BLOCKS
    blocks = splash.BlockSizes(
        block_q=case.block_q,
        block_kv=case.block_kv,
        block_kv_compute=case.block_kv_compute,
        block_q_dkv=case.block_q,
        block_kv_dkv=case.block_kv,
        block_kv_dkv_compute=case.block_kv_compute,
        use_fused_bwd_kernel=True,
    )
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([make_mask(case.mask, size_q, size_kv)]), block_sizes=blocks
    )
    q = jax.ShapeDtypeStruct((1, size_q, case.head_dim), case.dtype)
    kv = jax.ShapeDtypeStruct((1, size_kv, case.head_dim), case.dtype)

    def attend(q: Any, k: Any, v: Any) -> Any:
        if case.mask != "segments":
            return kernel(q, k, v)
        ids = splash.SegmentIds(jnp.zeros(size_q, jnp.int32), jnp.zeros(size_kv, jnp.int32))
        return kernel(q, k, v, segment_ids=ids)

    function = attend
    if case.direction == "backward":
        function = jax.grad(lambda *a: attend(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    calls = find_calls(jax.make_jaxpr(function)(q, kv, kv))
    return [call for call in calls if ("fwd" in call.name) == (case.direction == "forward")]


def tiles(kind: str, block_q: int, block_kv: int) -> tuple[int, int, float]:
    """Blocks that are run, blocks in the grid of the kernel, and pairs of query and key needed.

    Splash leaves out columns of the grid that no row needs, as with a window.
    """
    rows, columns = math.ceil(SEQUENCE / block_q), math.ceil(SEQUENCE / block_kv)
    first = [0] * rows
    last = [columns - 1] * rows
    pairs = float(SEQUENCE) ** 2
    if kind in ("causal", "window"):
        last = [min(columns - 1, ((row + 1) * block_q - 1) // block_kv) for row in range(rows)]
        pairs = SEQUENCE * (SEQUENCE + 1) / 2
    if kind == "window":
        first = [max(0, row * block_q - WINDOW) // block_kv for row in range(rows)]
        pairs -= (SEQUENCE - WINDOW) * (SEQUENCE - WINDOW - 1) / 2
    if kind == "padding":
        last = [(SEQUENCE - PADDING - 1) // block_kv] * rows
        pairs = float(SEQUENCE) * (SEQUENCE - PADDING)
    counts = [b - a + 1 for a, b in zip(first, last, strict=True)]
    return sum(counts), rows * max(counts), pairs


def measure(case: Case) -> dict[str, Any]:
    """Compile a case; its table entry.

    Raises:
        KernelCompileError: it does not fit the chip's on-chip memory, as a rule.
    """
    chip = chip_of(case.chip)
    run, grid, pairs = tiles(case.mask, case.block_q, case.block_kv)
    rows = math.ceil(SEQUENCE / (case.block_q if case.direction == "forward" else case.block_kv))
    ceiling = chip.attention_fill(case.head_dim)
    cycles = seconds = 0.0
    for call in calls_of(case):
        found: KernelSchedule = schedule_call(call, case.chip)
        step = found.cycles_a_step(active=run / grid, row_steps=max(1, grid // rows))
        cycles += grid * step
        # Heads are spread over the cores of a chip.
        compute = grid * step / chip.clock_hz / (chip.cores if found.parallel else 1)
        # Blocks that are run are run whole.
        products = run * found.flops / found.steps
        least = max(
            run * found.step_bytes / chip.hbm_bandwidth, products / chip.bf16_flops / ceiling
        )
        seconds += max(compute, least)
    products = 4 if case.direction == "forward" else 10
    share = products * pairs * case.head_dim / seconds / chip.bf16_flops
    return {
        **asdict(case),
        "seconds": float(f"{seconds:.4g}"),
        "bundles": round(cycles),
        "share_of_peak": round(share, 4),
        "share_of_ceiling": round(share / ceiling, 4),
    }


def cases(
    chips: list[str], dims: list[int], dtypes: list[str], kinds: list[str], directions: list[str]
) -> Iterator[Case]:
    """Every case, in the order of the arguments."""
    for direction, chip, dim, dtype, kind, blocks in itertools.product(
        directions, chips, dims, dtypes, kinds, BLOCKS
    ):
        yield Case(chip, dim, dtype, kind, direction, *blocks)


def load(path: Path) -> dict[str, Any]:
    """The table as it is, or an empty one."""
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    return {
        "sequence": SEQUENCE,
        "window": WINDOW,
        "padding": PADDING,
        "libtpu": version("libtpu"),
        "entries": [],
        "refused": [],
    }


def save(path: Path, table: dict[str, Any]) -> None:
    """Write the table, one entry a line, in a fixed order."""

    def key(entry: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(entry[name] for name in Case.__dataclass_fields__)

    lines = [
        f' "{name}": [\n'
        + ",\n".join(f"  {json.dumps(entry)}" for entry in sorted(table[name], key=key))
        + "\n ]"
        for name in ("entries", "refused")
    ]
    head = [f' "{n}": {json.dumps(v)}' for n, v in table.items() if n not in ("entries", "refused")]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("{\n" + ",\n".join(head + lines) + "\n}\n", encoding="utf-8")
    temporary.replace(path)


def known(table: dict[str, Any]) -> set[Case]:
    """The cases that a table has an answer for."""
    names = Case.__dataclass_fields__
    return {Case(**{n: e[n] for n in names}) for e in table["entries"] + table["refused"]}


def main() -> None:
    """Compile what is missing, as long as time allows; write the table and the page of docs/."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_blocks", description=__doc__
    )
    parser.add_argument("--chips", nargs="+", default=["v6e", "v5e", "v5p"], choices=list(CHIPS))
    parser.add_argument("--head-dims", nargs="+", type=int, default=[128, 64, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--directions", nargs="+", default=["forward", "backward"])
    parser.add_argument("--minutes", type=float, default=60, help="start no compile after so long")
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args()
    stop = time.monotonic() + 60 * options.minutes
    table = load(options.out)
    for case in cases(
        options.chips, options.head_dims, options.dtypes, options.masks, options.directions
    ):
        if time.monotonic() > stop:
            break
        if case in known(table):
            continue
        start = time.monotonic()
        try:
            entry = measure(case)
        except KernelCompileError as error:
            table["refused"].append({**asdict(case), "reason": str(error)})
            print(case, error, flush=True)
        else:
            table["entries"].append(entry)
            print(entry, f"{time.monotonic() - start:.0f} s", flush=True)
        save(options.out, table)


if __name__ == "__main__":
    main()
