"""A program for other strings and numbers among a call's arguments, if no code looks at them.

A label, a path or a step that a call only carries along does not decide anything. The first time
that a call differs from a program in such values alone, the code is traced with them
sealed. If nothing looks at one, and the program is the same, it holds for all values.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tpuport.foundation.pytree.sealed import SealedTrace, WasRead, apart, replaced
from tpuport.foundation.user_frames import is_inside
from tpuport.model.program_cache import CachedProgram, CallArguments, Signature, release
from tpuport.tracing.session.seen_types import seen_in
from tpuport.tracing.state.request import TraceResult

# What walks through arguments without deciding anything by them.
_WALKS = tuple(
    str(Path(__file__).parents[1] / part)
    for part in (
        "foundation/pytree/",
        "tracing/session/",
        "tracing/control_flow/",
        "tracing/core/arguments.py",
        "tracing/guards/",
        "tracing/state/",
    )
)


def fitting(
    programs: Iterable[CachedProgram],
    signature: Signature,
    state: dict[str, Any],
    given: CallArguments,
    trace: Callable[[CallArguments], CachedProgram],
) -> CachedProgram | None:
    """Return a program of other strings and numbers that is right for a call, or None.

    Args:
        programs: the programs to choose from.
        signature: the signature of the call.
        state: the state of the model.
        given: the arguments of the call.
        trace: traces the code for such arguments.
    """
    key, values = apart(given.spec)
    if not values:
        return None
    alike = [
        known
        for known in programs
        if (known.signature.method, known.form[0]) == (signature.method, key)
        and known.tape is None
        and known.signature.key[1:] == signature.key[1:]
    ]
    read = set().union(*(known.read for known in alike))
    for known in alike:
        places = _differing(known.form[1], values)
        if places & read or known.changed(state) is not None:
            continue
        if places <= known.unread or _are_unread(known, places, given, trace):
            known.unread |= places
            return known
        known.read |= places - known.unread
        return None
    return None


def _differing(ours: list[Any], theirs: list[Any]) -> set[int]:
    # By `repr`, as 0.0 equals -0.0.
    pairs = enumerate(zip(ours, theirs, strict=True))
    return {index for index, (a, b) in pairs if a != b or repr(a) != repr(b)}


def _are_unread(
    known: CachedProgram,
    places: set[int],
    given: CallArguments,
    trace: Callable[[CallArguments], CachedProgram],
) -> bool:
    """Return whether a trace with sealed values looks at none, and gives the same program."""
    if not _is_pure(known):
        return False
    trial = SealedTrace(_WALKS)
    values = [
        trial.seal(value) if index in places else value for index, value in enumerate(known.form[1])
    ]
    spec = replaced(given.spec, values)
    try:
        with seen_in(_namespaces()):
            made = trace(dataclasses.replace(given, spec=spec))
    except (WasRead, Exception):
        # Whatever a sealed value led to: the trace with the values themselves tells what is wrong.
        return False
    finally:
        trial.is_running = False
    same = _same_results(known, made) and known.run.same(made.run)
    release(made.outcome)
    return same and _is_pure(made) and not trial.reads


def _namespaces() -> list[dict[str, Any]]:
    """Return the globals of all code that is no library's, where `type(x)` is to notice."""
    modules = [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]
    files = [(vars(one), vars(one).get("__file__")) for one in modules]
    named = [(space, file) for space, file in files if isinstance(file, str)]
    main = vars(sys.modules["__main__"])
    return [main, *(space for space, file in named if file.endswith(".py") and not is_inside(file))]


def _is_pure(compiled: CachedProgram) -> bool:
    """Return whether a program changes nothing but tensors, and read no argument's value."""
    outcome = compiled.outcome
    changes = outcome.argument_changes is not None or outcome.python_changes is not None
    return not (changes or outcome.host_paths or outcome.placed)


def _same_results(ours: CachedProgram, theirs: CachedProgram) -> bool:
    a, b = ours.outcome, theirs.outcome
    return (
        a.out_spec.key == b.out_spec.key
        and list(map(_described, a.out_metas)) == list(map(_described, b.out_metas))
        and _described_state(a) == _described_state(b)
        and a.uses_key == b.uses_key
        and a.out_aliases == b.out_aliases
        and len(a.trace.recorder.checks) == len(b.trace.recorder.checks)
    )


def _described_state(outcome: TraceResult) -> Any:
    metas = {name: _described(meta) for name, meta in outcome.state_metas.items()}
    return outcome.changed, outcome.bound, outcome.rebound, metas


def _described(meta: Any) -> Any:
    if not isinstance(meta, torch.Tensor):
        return meta
    return (meta.dtype, meta.shape, meta.stride(), meta.requires_grad, meta.is_leaf)
