"""The time of a Pallas kernel, from the schedule that libtpu makes when it compiles it.

No TPU is needed and nothing is run. A bundle takes one cycle if nothing stalls, so these are lower
bounds of a kernel whose data arrives in time; a step of the grid never takes less than its
transfers from HBM do. libtpu writes schedules only if it is told to when it is loaded, and then it
writes every pass of every kernel (some hundred MB). So each kernel is compiled alone in a process
of its own.
"""

import dataclasses
import importlib.util
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

from tpuport.cost.bundles import Bundles, Span, read_bundles
from tpuport.cost.chips import Chip, chip_of
from tpuport.foundation.errors import MissingExtraError, TpuportError, UsageError

# The smallest slice of each chip that libtpu describes.
_SLICES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
_BUNDLES = "-final_bundles.txt"
# Kernels compiled at a time: each one's schedules take some hundred MB of disk while they are read.
_AT_ONCE = 4


class KernelCompileError(TpuportError):
    """libtpu could not compile a kernel; most often it does not fit the on-chip memory."""


class UnknownTripsError(UsageError):
    """A loop in a kernel's schedule, often one of libtpu's own, has an unknown trip count."""


@dataclass(frozen=True)
class KernelSchedule:
    """The schedule of one kernel.

    Args:
        name: the kernel's name.
        chip: the chip that it was compiled for.
        grid: its grid.
        bundles: its instructions.
        parallel: whether a dim of the grid may be split over the cores of a chip.
        step_bytes: bytes that one step of the grid reads from HBM and writes to it.
        trips: trip count of each loop within a step, in the order of the schedule.
        flops: FLOPs of one call in which no step is skipped.
        active: share of the steps that run their matrix products; the others are skipped, as a
            causal mask skips blocks above the diagonal. None if it is not known.
    """

    name: str
    chip: Chip
    grid: tuple[int, ...]
    bundles: Bundles
    parallel: bool = False
    step_bytes: float = 0.0
    trips: tuple[int, ...] = ()
    flops: int = 0
    active: float | None = None

    @property
    def steps(self) -> int:
        """Return the steps of the grid of one call."""
        return math.prod(self.grid)

    @property
    def step(self) -> Span:
        """Return the loop over the grid; for a kernel without one, all bundles."""
        # On a chip of two cores the loop is nested in a span that the second core may skip.
        loops = [span for span in self.bundles.whole.walk() if span.is_loop]
        if self.steps == 1 or not loops:
            return self.bundles.whole
        return max(loops, key=lambda span: (span.products, len(span)))

    def cycles_a_step(self, active: float | None = None, row_steps: int | None = None) -> float:
        """Return the bundles of one step of the grid, on average.

        Args:
            active: active share instead of the kernel's own; an unknown one counts as 1.
            row_steps: period, in steps, of the parts without matrix products that a jump can skip
                (such as `pl.when(j == 0)`). Default: the grid's innermost dim.
        """
        active = self._active(active)
        row_steps = row_steps or (self.grid[-1] if self.grid else 1)
        trips = iter(self.trips)
        return self._cycles(self.step, active, 1 / row_steps, trips, top=True)

    def _active(self, given: float | None) -> float:
        known = 1.0 if self.active is None else self.active
        return known if given is None else given

    def _cycles(
        self, span: Span, active: float, seldom: float, trips: Any, top: bool = False
    ) -> float:
        times = 1.0
        if span.is_loop and not top:
            trip = next(trips, None)
            if trip is None:
                raise UnknownTripsError(
                    f"Kernel {self.name} has a loop within a step of its grid, and how often it"
                    " runs is not in its schedule. What to do: give trips=, one number a loop"
                )
            times = trip
        total = float(span.own)
        for inner in span.inner:
            cycles = self._cycles(inner, active, seldom, trips)
            if not inner.is_loop:
                innermost = not any(s.products and not s.is_loop for s in inner.inner)
                cycles *= (active if innermost else 1.0) if inner.products else seldom
            total += cycles
        return total * times

    def seconds(self, active: float | None = None, row_steps: int | None = None) -> float:
        """Return the time of one call; the arguments are those of `cycles_a_step`.

        It is the longest of three times: its bundles, its transfers, and its products at the peak
        of the matrix units. The last one matters before v6e, where a bundle can start more products
        than a cycle completes.
        """
        active = self._active(active)
        cycles = self.cycles_a_step(active, row_steps)
        cores = self.chip.cores if self.parallel else 1
        outside = len(self.bundles.whole) - len(self.step)
        compute = (outside + self.steps / cores * cycles) / self.chip.clock_hz
        transfer = self.steps * active * self.step_bytes / self.chip.hbm_bandwidth
        products = active * self.flops / (self.chip.bf16_flops * cores / self.chip.cores)
        return max(compute, transfer, products)


def schedule_function(
    function: Callable[..., Any],
    args: Sequence[jax.ShapeDtypeStruct],
    chip: str,
    *,
    timeout: float = 600.0,
) -> dict[str, Bundles]:
    """Compile a function and return the schedule of each Pallas kernel in it, by kernel name.

    Args:
        function: function to compile, by itself, for one chip.
        args: shapes of its arguments.
        chip: chip's name, as for `chip_of`.
        timeout: seconds to wait for libtpu.

    Raises:
        MissingExtraError: libtpu is not installed.
        KernelCompileError: libtpu cannot compile it, with its own reason.
        ScheduleFormatError: libtpu writes schedules in an unknown form.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise MissingExtraError("the time of a kernel", "libtpu", "tpu")
    facts = chip_of(chip)
    with jax.sharding.use_abstract_mesh(_abstract(facts)):
        exported = jax.export.export(jax.jit(function), platforms=["tpu"])(*args)
    with tempfile.TemporaryDirectory(prefix="tpuport-schedule-") as folder:
        program = Path(folder, "program")
        # Pickled, because jax.export's own serialisation needs flatbuffers. Gradients, which do
        # not pickle, are not needed.
        program.write_bytes(pickle.dumps(dataclasses.replace(exported, _get_vjp=None)))
        dump = Path(folder, "dump")
        _compile(program, _SLICES[facts.name], dump, timeout)
        found = {
            _kernel_name(path.name): read_bundles(
                path.read_text(encoding="utf-8", errors="replace")
            )
            for path in sorted(dump.glob(f"*{_BUNDLES}"))
            if "schedule-analysis" not in path.name
        }
    return _kernels(found)


def _kernels(found: dict[str, Bundles]) -> dict[str, Bundles]:
    """Return the schedules of Pallas kernels, without those of copies that XLA puts around them.

    Copies have a grid, too, and loops whose number of rounds nobody knows.
    """
    kernels = {name: bundles for name, bundles in found.items() if bundles.is_kernel}
    return kernels or {name: bundles for name, bundles in found.items() if bundles.grid}


def _abstract(chip: Chip) -> AbstractMesh:
    device = jax.sharding.AbstractDevice(chip.device_kind, chip.cores, "tpu")
    return AbstractMesh((1,), ("chip",), abstract_device=device)


def _compile(program: Path, topology: str, dump: Path, timeout: float) -> None:
    environment = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        # The user's own options are kept: they change how kernels are compiled.
        LIBTPU_INIT_ARGS=f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={dump}"
        " --xla_jf_dump_llo_text=true".strip(),
    )
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "tpuport.cost.compile_alone", str(program), topology]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise KernelCompileError(
            f"libtpu did not finish a kernel for {topology} within {timeout:.0f} s."
            " What to do: make its blocks smaller, or give a larger timeout="
        ) from error
    if done.returncode:
        raise KernelCompileError(
            f"libtpu cannot compile the kernel for {topology}: {_reason(done.stderr)}"
        )


def _reason(stderr: str) -> str:
    """Return the last exception's message, which may have several lines."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    starts = [at for at, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    said = lines[starts[-1] :] if starts else lines[-3:]
    return " ".join(said)[:500] or "it gave no reason"


def _kernel_name(file: str) -> str:
    """Read a kernel's name: `1795-splash_mha_fwd.1-72-final_bundles.txt` -> `splash_mha_fwd`."""
    name = file.removesuffix(_BUNDLES).partition("-")[2].rpartition("-")[0]
    return re.sub(r"\.\d+$", "", name)


def schedule_kernels(jaxpr: Any, chip: str, *, timeout: float = 600.0) -> dict[str, KernelSchedule]:
    """Return the schedule of every Pallas call of a traced program, by kernel name.

    Calls of the same name, grid and shapes are compiled once. If several calls share a name, the
    later ones are called `name (2)` and so on.

    Args:
        jaxpr: a closed jaxpr; calls are found at any depth.
        chip: chip's name, as for `chip_of`.
        timeout: seconds to wait for libtpu, for each kernel.

    Raises:
        MissingExtraError: libtpu is not installed.
        KernelCompileError: libtpu cannot compile a kernel, with its own reason.
    """
    from tpuport.cost.kernels import find_calls

    calls: dict[str, Any] = {}
    for call in find_calls(jaxpr):
        key, count = call.name, 1
        while key in calls:
            count += 1
            key = f"{call.name} ({count})"
        calls[key] = call
    # Threads suffice: each one waits for a process in which libtpu works on one core.
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        waiting = {
            key: pool.submit(schedule_call, call, chip, timeout=timeout)
            for key, call in calls.items()
        }
        try:
            return {key: one.result() for key, one in waiting.items()}
        finally:
            pool.shutdown(cancel_futures=True)


def schedule_call(call: Any, chip: str, *, timeout: float = 600.0) -> KernelSchedule:
    """Return the schedule of one `kernels.KernelCall`; errors as in `schedule_kernels`."""
    schedules = schedule_function(call.run, call.args, chip, timeout=timeout)
    return KernelSchedule(
        call.name,
        chip_of(chip),
        call.grid,
        _only(schedules.values(), call.name),
        parallel=call.parallel,
        step_bytes=call.step_bytes,
        trips=call.trips,
        flops=call.products,
        active=call.active,
    )


def _only(found: Iterable[Bundles], name: str) -> Bundles:
    several = sorted(found, key=lambda bundles: bundles.whole.stop)
    if not several:
        raise KernelCompileError(f"libtpu wrote no schedule for the kernel {name}")
    return several[-1]
