"""`tpuport.compile_for`: compile for a slice, and report whether it fits and what it costs."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from jax.sharding import Mesh

from tpuport.aot.abstract_model import num_slices, spread_out
from tpuport.aot.advice import advise
from tpuport.aot.aot import Ahead, compile_ahead
from tpuport.aot.entry_points import forward_step, function_step, training_step
from tpuport.aot.memory import held_at_peak, largest_computed, listed_by_compiler, read_memory
from tpuport.aot.records import Captured, HeldMemory, Seconds, Work
from tpuport.aot.report import CompileReport
from tpuport.aot.work import calibration_for, captured_constants, read_traced, read_work
from tpuport.cost.calibration import Calibration
from tpuport.cost.hlo.parser import HloProgram, read_program
from tpuport.cost.records import Estimate
from tpuport.cost.walking import sub_jaxprs
from tpuport.diagnosis.explain import explaining
from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.name_patterns import generalised
from tpuport.foundation.reporting.markup import plural
from tpuport.model.ported_model import PortedModel
from tpuport.reports import wording as fmt
from tpuport.sharding.mesh import sizes_of
from tpuport.sharding.plan import ShardingPlan
from tpuport.sharding.shard import OnMesh, ShardingWarning
from tpuport.training.first_call_state import settled
from tpuport.training.optimizer_state import as_optimizer
from tpuport.training.step_function import Training, Trains
from tpuport.training.trainable import trained_names

CONSTANT_BUDGET = 1 << 20
# The smallest share of float32 among the FLOPs of products that is reported.
_COUNTS = 1e-3
_PACKAGES = ("tpuport", "jax", "libtpu")
# libtpu's least effort to make a program fast; 0 is its default.
_LITTLE_EFFORT = {"exec_time_optimization_effort": -1.0}


@explaining()
def compile_for(
    ported: PortedModel | Trains,
    topology: str | None = None,
    *,
    inputs: Any,
    mesh: Mesh | Mapping[str, int] | None = None,
    rules: Any = "fsdp",
    train: bool | Callable[[Any], Any] = False,
    optimizer: Any = "adamw",
    method: str | Callable[..., Any] = "forward",
    constant_budget: int = CONSTANT_BUDGET,
    kernel_times: bool = True,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    quick: bool = False,
    options: dict[str, Any] | None = None,
    **spreading: Any,
) -> CompileReport:
    """Compile a ported model for a TPU that need not be present, and report its memory and cost.

    Nothing is run, and no weight is needed: convert a model made under `torch.device("meta")`. Only
    the shapes of a model's weights are used. The model is not changed.

    Args:
        ported: the ported model of `tpuport.convert`, or a training step that `make_train_step`
            made of it. Exactly that step is then compiled, with clipping and averages, and `inputs`
            are its arguments other than its state.
        topology: a slice: `v6e-8`, `v5p-16`, `v5e-4`, or libtpu's name such as `v6e:2x4`.
        inputs: the arguments of the call: a tuple of positional ones, a dict of keyword ones, or a
            pair (tuple, dict). Shapes may replace tensors; sizes are those of all chips together.
        mesh: sizes by axis (default: all chips along fsdp), or a mesh instead of a topology.
        rules: as for `tpuport.shard`: a preset's name, or a table.
        train: compile a training step: True if the output is or has a `loss`, or a function of the
            output that returns one. Gradients that are not finite are applied all the same.
        optimizer: an optax optimizer, the name of one, or None for gradients alone.
        method: name of the model's method; or a jax function around its `apply`, called with the
            copy that is compiled, its `params`, its `buffers`, a key, and the inputs.
        constant_budget: most bytes of constants of the host that are not worth a finding.
        kernel_times: compile each Pallas kernel once more to read its schedule; without it there is
            no estimate for a program with kernels.
        calibration: the file that `tpuport doctor --measure` wrote on a chip of this kind; the
            estimate then has the rates that were measured there.
        quick: let the compiler spend less on making the program fast: half the time or much less,
            for a report of a program that is about as good (docs/compile.md has figures).
        options: compiler options, such as `{"xla_tpu_scoped_vmem_limit_kib": 65536}`.
        **spreading: arguments of `Spreading`.

    Returns:
        A report. `report.fits` says whether the program fits; if it does not, that is no error.

    Raises:
        PortError: the code cannot be ported exactly.
        UsageError: an argument is wrong, the topology is unknown, or the calibration is of another
            kind of chip.
        MissingExtraError: libtpu is not installed.
    """
    training = _training_of(ported, method, train, optimizer)
    model: Any = ported if training is None else training.ported
    spread, plan = spread_out(model, topology, mesh, rules, **spreading)
    placement: Any = spread._placement
    measured = calibration_for(placement.mesh, calibration)
    options = {**(_LITTLE_EFFORT if quick else {}), **(options or {})}
    ahead = settled(lambda: _ahead(training, spread, method, inputs, options))
    names = _names(training, method, topology, placement.mesh)
    report = _reported(ahead, spread, plan, constant_budget, (kernel_times, measured), names)
    return replace(report, quick=quick)


def _ahead(
    training: Training | None, spread: PortedModel, method: Any, inputs: Any, options: Any
) -> Ahead:
    placement: Any = spread._placement
    with _quiet():
        if training is not None:
            # Equal blocks may have been stacked since, and their weights have other names then.
            chosen = training.trained
            trained = None if chosen is None else trained_names(spread, sorted(chosen))
            step = training_step(replace(training, ported=spread, trained=trained), inputs)
        elif callable(method):
            step = function_step(spread, method, inputs)
        else:
            step = forward_step(spread, method, inputs)
        return compile_ahead(step, placement.mesh, options)


def _names(
    training: Training | None, method: Any, topology: str | None, mesh: Mesh
) -> dict[str, str]:
    """Return in words what is compiled, for which slice, and with which optimizer."""
    slices = num_slices(mesh)
    where = "" if topology is None else topology if slices == 1 else f"{slices} x {topology}"
    return {
        "what": _called(method) if training is None else "training step",
        "topology": where,
        "optimizer": "" if training is None else training.optimizer_name,
    }


def _called(method: Any) -> str:
    return method if isinstance(method, str) else getattr(method, "__name__", "function")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of the sharding rules, which are in the report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardingWarning)
        yield


def _training_of(
    ported: PortedModel | Trains, method: Any, train: Any, optimizer: Any
) -> Training | None:
    """Return the training step to compile; None for a call of a method or function.

    Raises:
        UsageError: a step is given together with arguments that define one; or a function around
            the model is to be trained.
    """
    given = getattr(ported, "training", None)
    if isinstance(given, Training):
        if train or (method, optimizer) != ("forward", "adamw"):
            raise UsageError(
                "compile_for was given a training step, which has its own optimizer, loss and"
                " method. What to do: leave train=, optimizer= and method= out"
            )
        return given
    if not train or not isinstance(ported, PortedModel):
        return None
    if callable(method):
        raise UsageError(
            f"method={_called(method)} is a function around the model, but train= needs a method."
            " What to do: name a method, or take gradients in the function and leave train= out"
        )
    name = optimizer if isinstance(optimizer, str) else "" if optimizer is None else "of your own"
    loss = train if callable(train) else None
    return Training(ported, method, as_optimizer(optimizer), loss=loss, optimizer_name=name)


def _reported(
    ahead: Ahead,
    spread: PortedModel,
    plan: ShardingPlan,
    constant_budget: int,
    timing: tuple[bool, Calibration | None],
    names: dict[str, str],
) -> CompileReport:
    modules = {fqn for fqn, _ in spread.module.named_modules() if fqn}
    # Blocks that share a program have one name in it, such as `blocks.*`.
    modules |= {generalised(fqn) for fqn in modules}
    placement: Any = spread._placement
    read = _read(ahead, modules, placement, *timing)
    captured = captured_constants(ahead, modules)
    device, refused = placement.mesh.devices.flat[0], ahead.too_large
    report = CompileReport(
        model=type(spread.module).__name__,
        what=names["what"],
        topology=names["topology"],
        device=str(device.device_kind),
        mesh=sizes_of(placement.mesh),
        rules=plan.rules,
        memory=read_memory(ahead, read.program, device),
        seconds=Seconds(**ahead.seconds),
        held=read.held,
        held_is_whole=refused is not None and not refused.largest,
        work=read.work,
        estimate=read.time,
        attention=tuple(spread.report.attention),
        captured=captured,
        constant_budget=constant_budget,
        optimizer=names["optimizer"],
        equations=len(ahead.jaxpr.jaxpr.eqns),
        refused="" if refused is None else refused.message,
        findings=(
            *_host_findings(ahead),
            *_findings(plan, captured, constant_budget, read.work),
        ),
        versions=_versions(),
    )
    if report.fits:
        return report
    return advise(report, plan, recomputes=spread._recomputes)


@dataclass(frozen=True)
class _Read:
    """Facts read from a compiled program, or from the traced one if it was refused."""

    program: HloProgram | None
    held: tuple[HeldMemory, ...]
    work: Work
    time: Estimate | None


def _read(
    ahead: Ahead,
    modules: set[str],
    placement: OnMesh,
    kernel_times: bool,
    calibration: Calibration | None,
) -> _Read:
    if ahead.too_large is not None:
        listed = listed_by_compiler(ahead.too_large.largest, modules)
        held = listed or largest_computed(ahead.jaxpr, modules)
        return _Read(None, held, read_traced(ahead, modules), None)
    text = ahead.compiled.as_text()
    program = read_program(text)
    work, time = read_work(
        ahead, text, modules, placement, kernel_times=kernel_times, calibration=calibration
    )
    return _Read(program, held_at_peak(program, modules), work, time)


def _host_findings(ahead: Ahead) -> list[str]:
    """Return a finding for each function that the program calls on the host."""
    names = dict.fromkeys(_callbacks_in(ahead.jaxpr.jaxpr))
    return [
        f"{name} runs on the host: the program waits for it, and for what moves there and back"
        for name in names
    ]


def _callbacks_in(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pure_callback":
            function = eqn.params["callback"].callback_func
            owner = getattr(function, "__self__", function)
            yield str(getattr(owner, "name", None) or getattr(function, "__name__", function))
        for inner in sub_jaxprs(eqn):
            yield from _callbacks_in(inner)


def _findings(
    plan: ShardingPlan, captured: tuple[Captured, ...], budget: int, work: Work
) -> list[str]:
    found = [str(finding) for finding in plan.findings]
    total = sum(one.bytes for one in captured)
    if total > budget:
        found.append(
            f"{plural(len(captured), 'constant')} of the host, {fmt.size(total)}, are part of the"
            f" program: {captured[0].shape} {captured[0].name} is the largest. Make them buffers,"
            " or arguments of the call"
        )
    return found + products_in_fp32(work)


def products_in_fp32(work: Work) -> list[str]:
    """Return a finding if most products are in bf16 and some are in float32, else nothing."""
    if not work.products or "bfloat16" not in work.products[0].dtypes:
        return []
    slipped = [one for one in work.fp32_products if one.flops]
    flops = sum(one.flops for one in slipped)
    share = flops / max(1, sum(one.flops for one in work.products))
    if share < _COUNTS:
        return []
    return [
        f"{share:.1%} of the FLOPs of products have float32 operands, most of them in"
        f" {slipped[0].module or 'no module'} ({slipped[0].dtypes})"
    ]


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
