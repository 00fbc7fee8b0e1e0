"""Tracing, lowering and compiling for a TPU that need not be present."""

import contextlib
import re
import time
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from tpuport.aot.cache.program_memory import not_from_memory
from tpuport.aot.crashes import crash_explained
from tpuport.aot.entry_points import EntryPoint
from tpuport.tracing.core.jaxpr_dce import without_dead_code

_UNITS = {"": 0, "B": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = r"([\d.]+)([BKMGT]?)"
# libtpu's messages about a program that does not fit, with the bytes needed and available.
_PLANNED = re.compile(rf"memory required for HLO temporaries \({_SIZE}\) exceeds .*?\({_SIZE}\)")
_RAN_OUT = re.compile(rf"Ran out of memory in memory space hbm\. Used {_SIZE} of {_SIZE} hbm")
_BUFFER = re.compile(rf"^  \d+\. Size: {_SIZE}\n((?:     .+\n)+)", re.MULTILINE)
_FACT = re.compile(r"^     (Operator|Shape|Allocation type|Unpadded size): (.+)$", re.MULTILINE)
_OPERATION = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class TooLarge:
    """The reason why libtpu refused a program.

    Attributes:
        wanted: bytes of HBM that one chip would need, arguments and results included.
        available: bytes of HBM that one chip has for programs.
        largest: size, shape and operation of the largest buffers, if libtpu lists them.
        message: first line of libtpu's message.
    """

    wanted: int
    available: int
    largest: tuple[tuple[int, str, str], ...]
    message: str


@dataclass
class Ahead:
    """A program traced and compiled ahead of time for a TPU.

    Attributes:
        jaxpr: the traced program (a `ClosedJaxpr`).
        names: name of each of its arguments, such as `params['lm_head.weight']`.
        shapes: shape and sharding of each argument.
        hoisted: large constants of the host that the program holds.
        compiled: `jax.stages.Compiled`, None if it does not fit.
        too_large: reason why it does not fit, or None.
        seconds: time of each stage.
    """

    jaxpr: Any
    names: list[str]
    shapes: list[Any]
    hoisted: list[Any]
    compiled: Any
    too_large: TooLarge | None
    seconds: dict[str, float]


def compile_ahead(step: EntryPoint, mesh: Mesh, options: dict[str, Any] | None = None) -> Ahead:
    """Compile a step for the devices of a mesh.

    Args:
        step: step to compile.
        mesh: mesh of real or described devices.
        options: compiler options, such as `{"xla_tpu_scoped_vmem_limit_kib": 65536}`.

    Raises:
        PortError: the code cannot be ported exactly.
        jax.errors.JaxRuntimeError: the compiler refuses it for a reason other than HBM.
    """
    given = tuple(step.arguments.values())
    jitted = jax.jit(step.function, donate_argnums=step.donated, out_shardings=step.out_shardings)
    start = time.perf_counter()
    # Not under the mesh: a described device cannot make the constants that tracing needs.
    traced = jitted.trace(*given)
    then = time.perf_counter()
    seconds = {"trace": then - start}
    # Lowering a Pallas call asks the mesh which chip it is for.
    with jax.set_mesh(mesh):
        lowered = traced.lower(lowering_platforms=(mesh.devices.flat[0].platform,))
    start, then = then, time.perf_counter()
    seconds["lower"] = then - start
    compiled = too_large = None
    platform = mesh.devices.flat[0].platform
    try:
        explained = crash_explained() if platform == "tpu" else contextlib.nullcontext()
        with explained, not_from_memory():
            compiled = lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        too_large = parse_too_large(str(error))
        if too_large is None:
            raise
    seconds["compile"] = time.perf_counter() - then
    paths, _ = jax.tree_util.tree_flatten_with_path(step.arguments)
    names = [_name(path) for path, _ in paths]
    shapes = [leaf for _, leaf in paths]
    # XLA drops unused values, such as a mask that attention does not need: the report drops them.
    closed = without_dead_code(traced.jaxpr)
    return Ahead(closed, names, shapes, closed.consts, compiled, too_large, seconds)


def parse_too_large(message: str) -> TooLarge | None:
    """Parse libtpu's message about a program that does not fit; None for any other message.

    libtpu's "temporaries" include the arguments and results: it plans before it names those.
    Source: messages of libtpu 0.0.42.1 for v5e, v5p and v6e.
    """
    planned, ran_out = _PLANNED.search(message), _RAN_OUT.search(message)
    found = planned or ran_out
    if found is None:
        return None
    largest = []
    for number, unit, body in _BUFFER.findall(message):
        facts = dict(_FACT.findall(body))
        operation = _OPERATION.search(facts.get("Operator", ""))
        shape = facts.get("Shape", "").partition("{")[0]
        largest.append((_bytes(number, unit), shape, operation[1] if operation else ""))
    return TooLarge(
        wanted=_bytes(found[1], found[2]),
        available=_bytes(found[3], found[4]),
        largest=tuple(largest),
        message=message.strip().splitlines()[0],
    )


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * (1 << _UNITS[unit]))


def _name(path: tuple[Any, ...]) -> str:
    """Name an argument as HLO does: `optimizer[0].mu['lm_head.weight']`."""
    return f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
