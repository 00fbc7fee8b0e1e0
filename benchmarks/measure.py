"""The measurements: steps, staging, growth with depth, and the Python cost of a call.

Staging is measured in CPU seconds: tracing is one thread of Python, and wall time would mostly show
the other load of the machine.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.contestants import (
    COMPILED,
    EAGER,
    FORWARD,
    OURS,
    PLAIN,
    Pure,
    make_eager,
    make_pure,
)
from benchmarks.models import Case
from benchmarks.timing import Series, interleaved, quiet, ratio

STAGES = ("trace", "lower", "compile")
# XLA's compile time is far longer than that of tracing, and varies less.
COMPILE_ROUNDS = 2
Row = dict[str, Any]


def measure_steps(
    case: Case,
    what: str,
    pure: dict[str, Pure],
    compiled: Callable[[], object] | None,
    *,
    rounds: int,
    seconds: float,
) -> tuple[list[Row], list[Row]]:
    """Measure the ported step against every other way to run the model.

    Returns:
        Rows of step ratios, and rows that compare the compiled programs themselves.
    """
    programs = _programs(pure, what)
    contestants = _run(programs, pure) | {EAGER: make_eager(case, what)}
    if compiled is not None:
        contestants[COMPILED] = compiled
    times = interleaved(contestants, rounds=rounds, seconds=seconds)
    steps = [
        {
            "model": case.name,
            "what": what,
            "against": name,
            **_both(times[OURS], times[name]),
        }
        for name in times
        if name != OURS
    ]
    sizes = [
        {
            "model": case.name,
            "what": what,
            "against": name,
            **_program_ratios(programs[OURS], programs[name]),
        }
        for name in programs
        if name != OURS
    ]
    return steps, sizes


def _both(times: Series, others: Series) -> Row:
    """Return the ratios of wall time, and the median ratio of CPU time."""
    return asdict(ratio(times.wall, others.wall)) | {"cpu": ratio(times.cpu, others.cpu).median}


def _program_ratios(ours: Any, theirs: Any) -> Row:
    """Return ratios of two compiled programs, which are the same on every run."""
    flops = [program.cost_analysis().get("flops", 0.0) for program in (ours, theirs)]
    memory = [program.memory_analysis().temp_size_in_bytes for program in (ours, theirs)]
    lines = [program.as_text().count(" = ") for program in (ours, theirs)]
    return {
        "instructions": lines[0] / lines[1],
        "flops": flops[0] / flops[1],
        "temporary_memory": memory[0] / max(memory[1], 1),
    }


def measure_staging(case: Case, what: str, pure: dict[str, Pure], *, rounds: int) -> list[Row]:
    """Measure trace, lowering and compile time of the ported model against the others'."""
    times = _stage_times(pure, what, rounds)
    rows = []
    for name in times:
        if name == OURS:
            continue
        for stage in (*STAGES, "trace and lower"):
            one = asdict(ratio(_of(times[OURS], stage), _of(times[name], stage)))
            rows.append({"model": case.name, "what": what, "stage": stage, "against": name, **one})
    return rows


def measure_first_result(case: Case, *, rounds: int) -> list[Row]:
    """Measure the time from a PyTorch module to its first result: `convert` and a call.

    `convert` does not verify here.
    """
    import jax
    import torchax

    import tpuport

    def ours() -> object:
        return tpuport.convert(case.module, verify=False)(*case.args)

    def plain() -> object:
        states, function = torchax.extract_jax(case.module)
        args = torchax.default_env().t2j_copy(case.args)
        return jax.block_until_ready(jax.jit(function)(states, args))

    times = interleaved({OURS: ours, PLAIN: plain}, rounds=rounds, seconds=0)
    one = asdict(ratio(times[OURS].cpu, times[PLAIN].cpu))
    return [{"model": case.name, "what": FORWARD, "stage": "first result", "against": PLAIN, **one}]


def measure_depth(
    make: Callable[[int], Case], depths: tuple[int, ...], *, rounds: int
) -> list[Row]:
    """Measure trace, lowering, compile and step time of the forward at several depths.

    `time` is relative to plain torchax's at the first depth, `against_plain` to its at the same
    depth.
    """
    rows: list[Row] = []
    reference: dict[str, float] = {}
    for layers in depths:
        pure = make_pure(make(layers))
        times = _stage_times(pure, FORWARD, rounds)
        steps = interleaved(_run(_programs(pure, FORWARD), pure), rounds=rounds, seconds=0.2)
        for name, stages in times.items():
            stages["step"] = steps[name].cpu
        for stage in (*STAGES, "step"):
            plain = statistics.median(times[PLAIN][stage])
            reference.setdefault(stage, plain)
            for name in times:
                middle = statistics.median(times[name][stage])
                rows.append(
                    {
                        "layers": layers,
                        "who": name,
                        "stage": stage,
                        "time": middle / reference[stage],
                        "against_plain": ratio(times[name][stage], times[PLAIN][stage]).median,
                    }
                )
    return rows


def measure_calls(*, rounds: int, seconds: float) -> list[Row]:
    """Measure the Python cost of calling a port of a model that computes next to nothing."""
    import jax
    import jax.numpy as jnp
    import torch

    import tpuport

    ported = tpuport.convert(torch.nn.Linear(4, 4), verify=False)
    tensor = torch.ones(2, 4)
    array = jnp.ones((2, 4))
    jitted = jax.jit(lambda params, x: ported.apply(params, {}, None, x)[0])
    contestants: dict[str, Callable[[], object]] = {
        "ported(jax array)": lambda: ported(array),
        "ported(torch tensor)": lambda: ported(tensor),
        "jax.jit(ported.apply)": lambda: jitted(ported.params, array),
    }
    times = interleaved(contestants, rounds=rounds, seconds=seconds)
    base = "jax.jit(ported.apply)"
    return [
        {"call": name, "against": base, **_both(times[name], times[base])}
        for name in contestants
        if name != base
    ]


def _programs(pure: dict[str, Pure], what: str) -> dict[str, Any]:
    import jax

    return {
        name: jax.jit(one.make(what)).lower(*one.inputs).compile() for name, one in pure.items()
    }


def _run(programs: dict[str, Any], pure: dict[str, Pure]) -> dict[str, Callable[[], object]]:
    import jax

    def step(name: str) -> Callable[[], object]:
        program, inputs = programs[name], pure[name].inputs
        return lambda: jax.block_until_ready(program(*inputs))

    return {name: step(name) for name in programs}


def _stage_times(
    pure: dict[str, Pure], what: str, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return CPU seconds by contestant and stage, one per round after a first warmup round."""
    names = list(pure)
    times: dict[str, dict[str, list[float]]] = {n: {s: [] for s in STAGES} for n in names}
    for number in range(-1, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            staged = _staged(pure[name], what, compiles=0 <= number < COMPILE_ROUNDS)
            for stage, seconds in staged.items():
                if number >= 0:
                    times[name][stage].append(seconds)
    return times


def _staged(pure: Pure, what: str, *, compiles: bool) -> dict[str, float]:
    """Return the CPU seconds of each stage of a function that jax has not seen before."""
    import jax

    jitted = jax.jit(pure.make(what))
    with quiet():
        start = time.process_time()
        traced = jitted.trace(*pure.inputs)
        after_trace = time.process_time()
        lowered = traced.lower()
        after_lowering = time.process_time()
        spent = {"trace": after_trace - start, "lower": after_lowering - after_trace}
        if compiles:
            lowered.compile()
            spent["compile"] = time.process_time() - after_lowering
    return spent


def _of(times: dict[str, list[float]], stage: str) -> list[float]:
    if stage == "trace and lower":
        return [a + b for a, b in zip(times["trace"], times["lower"], strict=True)]
    return times[stage]
