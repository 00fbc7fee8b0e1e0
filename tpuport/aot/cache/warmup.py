"""`tpuport.warmup`: many programs compiled ahead of their first call, several at a time."""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tpuport.aot.cache.compile_cache import CacheReport, watching
from tpuport.foundation.errors import UsageError
from tpuport.model import lowering
from tpuport.model.ported_model import PortedModel


@dataclass(frozen=True)
class Warmed:
    """One program that is ready.

    Attributes:
        name: Model, method and arguments: `Planner.forward(float32[4,8])`.
        hit: Whether the compile cache had it.
        seconds: Seconds of loading or compiling; 0 if this process had the program already.
    """

    name: str
    hit: bool
    seconds: float


def warmup(programs: Iterable[tuple[Any, ...]], *, workers: int | None = None) -> list[Warmed]:
    """Compile programs ahead, and run none of them.

    They are traced one after the other and compiled several at a time. Other processes can load
    them if this runs inside `tpuport.compile_cache()`.

    Args:
        programs: For each a ported model, a tuple of arguments, and a dict of keyword arguments
            if there are any (`method` is the method, `forward` if left out). Of tensors and
            arrays the shape will do: meta tensors, `jax.ShapeDtypeStruct`.
        workers: Programs to compile at a time; by default one a core.

    Returns:
        The outcome for each program, in order.

    Raises:
        PortError: the code cannot be ported exactly.
        UsageError: an item is of another form.
    """
    report = CacheReport("")
    with watching(report), ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        waiting = [
            pool.submit(_compile, _lower(item, index), report)
            for index, item in enumerate(programs)
        ]
        return [one.result() for one in waiting]


def _lower(item: Any, index: int) -> lowering.Lowered:
    match item:
        case (PortedModel() as ported, tuple(args)):
            kwargs: dict[str, Any] = {}
        case (PortedModel() as ported, tuple(args), dict(kwargs)):
            pass
        case _:
            raise UsageError(
                f"program {index}: expected (ported model, args tuple) or (ported model, args"
                f" tuple, kwargs dict), got {type(item).__name__} {_kinds(item)}".rstrip()
            )
    kwargs = dict(kwargs)
    return lowering.lower(ported, kwargs.pop("method", "forward"), args, kwargs)


def _kinds(item: Any) -> str:
    if not isinstance(item, tuple):
        return ""
    return f"of {', '.join(type(part).__name__ for part in item)}"


def _compile(lowered: lowering.Lowered, report: CacheReport) -> Warmed:
    start = len(report.programs)
    lowered.compile()
    here = threading.get_ident()
    own = [program for program in report.programs[start:] if program.thread == here]
    return Warmed(
        lowered.name,
        bool(own) and all(program.hit for program in own),
        sum(program.seconds for program in own),
    )
