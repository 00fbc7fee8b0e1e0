"""Search over meshes, rules and attention strategies; those that fit are ranked by time."""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from tpuport.aot.compile_for import compile_for
from tpuport.aot.report import CompileReport
from tpuport.foundation.errors import TpuportError
from tpuport.foundation.reporting.json_codec import encoded
from tpuport.foundation.reporting.markup import visible
from tpuport.foundation.reporting.saved_report import SavedReport, plain_text
from tpuport.foundation.reporting.templates import render
from tpuport.kernels.attention import BlockSizes
from tpuport.model.ported_model import PortedModel
from tpuport.reports import wording as fmt
from tpuport.sharding.layer_roles import LayerRole, uses_of
from tpuport.sharding.leaves import module_of
from tpuport.sharding.strategies import preset
from tpuport.sharding.topology import find_topology
from tpuport.tracing.attention.options import attention_options, choice

WIDTH = 110
# Each preset with the mesh axes that it shards over, in the order in which they are tried.
_AXES: dict[str, tuple[str, ...]] = {
    "fsdp": ("fsdp",),
    "ddp": ("data",),
    "fsdp_tensor_parallel": ("fsdp", "tensor"),
    "sequence_parallel": ("fsdp", "sequence"),
    "tensor_parallel": ("data", "tensor"),
    "expert_parallel": ("fsdp", "expert"),
}
# Sequence-parallel strategies to try in addition to the default.
_STRATEGIES = ("ulysses", "ring")
# Attention tiles to try with the best mesh: queries, keys, keys of one product.
_BLOCKS = ((3072, 2048, 1024), (2048, 2048, 1024), (1024, 2048, 1024), (1024, 1024, 512))


@dataclass(frozen=True)
class Trial:
    """One mesh tried with one table of rules.

    Attributes:
        mesh: sizes by axis.
        rules: name of the preset.
        report: report of the compilation; None if it failed, or has not been tried.
        error: why it failed, in one line.
        sequence_parallel: strategy for a sharded sequence (`tpuport.attention_options`), or
            "" for the default.
        blocks: tiles of the attention kernel, () for those of the table.
    """

    mesh: dict[str, int]
    rules: str
    report: CompileReport | None = None
    error: str = ""
    sequence_parallel: str = ""
    blocks: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the estimated time of a step; infinite without an estimate."""
        report = self.report
        if report is None or report.estimate is None:
            return float("inf")
        return report.estimate.seconds

    @property
    def name(self) -> str:
        """Return the trial's name: `fsdp_tensor_parallel on fsdp=4 tensor=2`."""
        where = " ".join(f"{k}={v}" for k, v in self.mesh.items())
        return ", ".join(filter(None, (f"{self.rules} on {where}", self.attention)))

    @property
    def attention(self) -> str:
        """Return the options of attention: `by ulysses`, `blocks 2048 x 1024 x 512`; "" if none."""
        blocks = f"blocks {' x '.join(map(str, self.blocks))}" if self.blocks else ""
        return " ".join(
            filter(None, (self.sequence_parallel and f"by {self.sequence_parallel}", blocks))
        )

    @property
    def has_kernel(self) -> bool:
        """Return whether a kernel computes its attention."""
        work = self.report.work if self.report is not None else None
        return work is not None and any(
            kind in one.kernel for one in work.attention for kind in ("splash", "dense")
        )


@dataclass(frozen=True)
class SearchReport(SavedReport):
    """The results of a search.

    Attributes:
        topology: the slice.
        trials: trials in the order in which they ran.
        left: number of trials that the time did not allow for.
    """

    topology: str
    trials: tuple[Trial, ...]
    left: int = 0

    @property
    def ranked(self) -> list[Trial]:
        """Return the trials that fit, the fastest by its estimate first."""
        fitting = [t for t in self.trials if t.report is not None and t.report.fits]
        return sorted(fitting, key=lambda t: (t.seconds, t.report.memory.peak if t.report else 0))

    @property
    def best(self) -> Trial | None:
        """Return the fastest of the trials that fit, or None."""
        return next(iter(self.ranked), None)

    def to_json(self) -> str:
        """Return the trials with their reports, as JSON."""
        return json.dumps(encoded(self), indent=1)

    def to_html(self) -> str:
        """Return the page of the best trial; if none fits, a page with the trials as text."""
        if self.best is None or self.best.report is None:
            return render("aot/templates/search.html.j2", search=self)
        return self.best.report.to_html()

    def __str__(self) -> str:
        return plain_text(self, WIDTH)

    def __rich__(self) -> Any:
        fitting = self.ranked
        table = Table(
            title=f"{self.topology}: {len(fitting)} of {len(self.trials)} tried fit"
            + (f", {self.left} not tried for want of time" if self.left else ""),
            title_justify="left",
            box=None,
            pad_edge=False,
        )
        for name in ("rules", "mesh", "attention", "a chip", "a step", "moved", "compiled in", ""):
            table.add_column(name, overflow="fold")
        others = [trial for trial in self.trials if trial not in fitting]
        for trial in [*fitting, *others]:
            table.add_row(*(Text(visible(cell)) for cell in _cells(trial)))
        return table


def search(
    ported: PortedModel,
    topology: str,
    *,
    inputs: Any,
    seconds: float = 1800.0,
    presets: Mapping[str, tuple[str, ...]] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    **options: Any,
) -> SearchReport:
    """Compile a model on meshes of a slice with preset rules, and rank the trials that fit.

    If attention runs by a TPU kernel, a mesh that shards the sequence is tried with each
    sequence-parallel strategy, and the best trial with other tiles of the kernel. Neither is done
    within a block of `tpuport.attention_options`, where the user has chosen.

    Args:
        ported: the ported model.
        topology: the slice.
        inputs: as for `compile_for`.
        seconds: time after which no trial begins.
        presets: mesh axes of each preset to try; by default those that suit the model.
        progress: called before each trial with the number done, the number of all, and its name.
        **options: further arguments of `compile_for`.

    Returns:
        All trials. One that cannot be compiled is among them, with its error.
    """
    chips = find_topology(topology).num_chips
    waiting = [Trial(mesh, rules) for rules, mesh in candidates(ported, chips, presets)]
    trials: list[Trial] = []
    start = time.monotonic()
    is_tuned = choice() is not None
    while waiting and (not trials or time.monotonic() - start <= seconds):
        trial = waiting.pop(0)
        if progress is not None:
            progress(len(trials), len(trials) + 1 + len(waiting), trial.name)
        trials.append(_try(ported, topology, trial, inputs, options))
        if choice() is None:
            waiting.extend(_other_ways(trials[-1]))
        if not waiting and not is_tuned:
            is_tuned = True
            waiting.extend(_other_blocks(SearchReport(topology, tuple(trials)).best))
    return SearchReport(topology, tuple(trials), len(waiting))


def _other_ways(trial: Trial) -> Iterator[Trial]:
    """Yield the same mesh with the other sequence-parallel strategies."""
    if trial.has_kernel and trial.mesh.get("sequence", 1) > 1 and not trial.attention:
        for strategy in _STRATEGIES:
            yield Trial(trial.mesh, trial.rules, sequence_parallel=strategy)


def _other_blocks(best: Trial | None) -> Iterator[Trial]:
    """Yield the best trial with other tiles of its kernel."""
    if best is not None and best.has_kernel:
        for blocks in _BLOCKS:
            yield replace(best, report=None, blocks=blocks)


def candidates(
    ported: PortedModel, chips: int, presets: Mapping[str, tuple[str, ...]] | None = None
) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield presets with meshes to try, leaving out those with the same specs.

    Args:
        ported: the ported model.
        chips: number of chips.
        presets: mesh axes of each preset; by default those that suit the model.
    """
    seen = set()
    has_experts = any(
        use.role is LayerRole.EXPERTS or use.one_expert
        for use in uses_of(module_of(ported)).values()
    )
    for rules, axes in (presets or _AXES).items():
        if rules == "expert_parallel" and not has_experts:
            continue
        for mesh in factorisations(chips, axes):
            table = preset(rules, ported, mesh)
            specs = str(table.specs(ported, mesh)), str(list(table.activations.lines()))
            key = (tuple(sorted(mesh.items())), specs)
            if key not in seen:
                seen.add(key)
                yield rules, mesh


def factorisations(chips: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Yield sizes by axis that multiply to `chips`; each axis of several has 2 or more."""
    if len(axes) == 1:
        yield {axes[0]: chips}
        return
    divisors = [n for n in range(2, chips + 1) if chips % n == 0]
    for sizes in itertools.product(divisors, repeat=len(axes)):
        total = 1
        for size in sizes:
            total *= size
        if total == chips:
            yield dict(zip(axes, sizes, strict=True))
    # The last axis alone: tensor parallelism over all chips.
    if len(axes) > 1 and chips > 1:
        yield {axes[-1]: chips}


def _try(
    ported: PortedModel, topology: str, trial: Trial, inputs: Any, options: dict[str, Any]
) -> Trial:
    try:
        with _attention_of(trial):
            report = compile_for(
                ported, topology, inputs=inputs, mesh=trial.mesh, rules=trial.rules, **options
            )
    except (TpuportError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()
        return replace(trial, error=first[0] if first else type(error).__name__)
    return replace(trial, report=report)


def _attention_of(trial: Trial) -> Any:
    given: dict[str, Any] = (
        {"sequence_parallel": trial.sequence_parallel} if trial.sequence_parallel else {}
    )
    if trial.blocks:
        given["blocks"] = BlockSizes(*trial.blocks)
    return attention_options(**given) if given else contextlib.nullcontext()


def _cells(trial: Trial) -> tuple[str, ...]:
    mesh = " ".join(f"{name}={size}" for name, size in trial.mesh.items())
    report = trial.report
    if report is None:
        return trial.rules, mesh, trial.attention, "", "", "", "", trial.error
    moved = sum(report.work.bytes_by_kind().values()) if report.work is not None else 0
    step = fmt.seconds(trial.seconds) if report.estimate is not None else ""
    return (
        trial.rules,
        mesh,
        trial.attention,
        fmt.size(report.memory.refused or report.memory.peak),
        step,
        fmt.size(moved) if report.fits else "",
        fmt.seconds(report.seconds.total),
        "" if report.fits else "does not fit",
    )
