"""Entries of the port report, made from what conversion and tracing found."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from tpuport.foundation.patching.shim import find_shims
from tpuport.reports.records import (
    AttentionCall,
    Branch,
    HoistedConstant,
    RegisteredOp,
    RepeatedBlocks,
    Rewrite,
    ShimUse,
)
from tpuport.reports.report import PortReport
from tpuport.tracing import patches
from tpuport.tracing.core.lowering_registry import LOWERINGS

_PACKAGES = ("tpuport", "torch", "torchax", "jax", "jaxlib", "libtpu", "transformers", "diffusers")


def new_report(target: torch.nn.Module | Callable[..., Any]) -> PortReport:
    """Make a report that names what is being ported, its size, and the versions of the packages."""
    versions = dict(_versions())
    if not isinstance(target, torch.nn.Module):
        return PortReport(
            getattr(target, "__name__", str(target)), class_file=_file(target), versions=versions
        )
    parameters = {id(p): p for p in torch.nn.Module.parameters(target)}.values()
    buffers = {id(b): b for b in torch.nn.Module.buffers(target)}.values()
    return PortReport(
        type(target).__name__,
        class_file=_file(type(target)),
        versions=versions,
        num_parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        num_buffers=sum(b.numel() for b in buffers),
        buffer_bytes=sum(b.numel() * b.element_size() for b in buffers),
    )


@functools.cache  # to read them takes longer than to trace a small model
def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _file(thing: Any) -> str:
    try:
        return inspect.getsourcefile(thing) or ""
    except (TypeError, OSError):
        return ""


def record(report: PortReport, outcome: Any, hoisted: list[torch.Tensor]) -> None:
    """Add what one trace did, except entries that an earlier trace already made."""
    trace = outcome.trace
    for rewrite in outcome.rewrites:
        for one in rewrite.applied:
            item = Rewrite(
                one.file,
                one.line,
                code=one.code,
                before=one.before,
                after=one.after,
                safety=one.safety,
            )
            if item not in report.rewrites:
                report.add(item)
    _record_branches(report, trace)
    report.host += [part for part in trace.recorder.hosts if part not in report.host]
    _record_counts(report, trace)
    record_attention(report, trace)
    _record_blocks(report, trace)
    for tensor in hoisted:
        size = tensor.numel() * tensor.element_size()
        report.add(
            HoistedConstant(
                "a host tensor", shape=tuple(tensor.shape), dtype=str(tensor.dtype)[6:], bytes=size
            )
        )
    if outcome.host_paths:
        report.notes.append(
            "the values of these arguments are read while tracing, so each new value compiles"
            " again: " + ", ".join(outcome.host_paths)
        )
    if outcome.baked:
        report.notes.append(
            "read as Python numbers while tracing, so a change of them compiles again: "
            + ", ".join(sorted(outcome.baked))
        )


def _record_branches(report: PortReport, trace: Any) -> None:
    import linecache

    known = {(b.file, b.line) for b in report.branches}
    for site, how in trace.explorer.branches.items():
        file, _, line = site.rpartition(":")
        if file and (file, int(line)) not in known:
            report.add(
                Branch(file, int(line), source=linecache.getline(file, int(line)).strip(), how=how)
            )


def record_attention(report: PortReport, trace: Any) -> None:
    """Record one line per kind of call, in place of an earlier trace's lines for the same calls."""
    found: dict[Any, AttentionCall] = {}
    for one in trace.recorder.counters.attention:
        key = dataclasses.replace(one, module="")
        first = found.get(key)
        found[key] = one if first is None else dataclasses.replace(first, calls=first.calls + 1)
    sites = {(one.file, one.line, one.query, one.key) for one in found}
    kept = [o for o in report.attention if (o.file, o.line, o.query, o.key) not in sites]
    report.attention[:] = [*kept, *found.values()]


def _record_blocks(report: PortReport, trace: Any) -> None:
    """Record one line per family of blocks that was called, in place of an earlier trace's."""
    if trace.blocks is None:
        return
    for one in trace.blocks.records.values():
        if not one.programs:
            continue
        first, last = one.names[0], one.names[-1]
        found = RepeatedBlocks(
            first,
            last,
            count=len(one.names),
            programs=one.programs,
            shared=one.shared,
        )
        report.blocks[:] = [b for b in report.blocks if (b.first, b.last) != (first, last)]
        report.add(found)


_name_of = functools.cache(str)  # an operation formats its name each time


def _record_counts(report: PortReport, trace: Any) -> None:
    reasons = {_name_of(op): entry.reason for op, entry in LOWERINGS.items()}
    known = {op.name for op in report.registered_ops}
    for name, calls in trace.recorder.counters.ops.items():
        reason = reasons.get(name) or reasons.get(name.rpartition(".")[0])
        if reason is not None and name not in known:
            report.add(RegisteredOp(name, reason=reason, calls=calls))
    by_target = {shim.TARGET: shim for shim in find_shims(patches)}
    for target, calls in trace.recorder.counters.shims.items():
        shim = by_target.get(target)
        if shim is not None and target not in {s.target for s in report.shims}:
            report.add(ShimUse(shim.__name__, target=target, reason=shim.REASON, calls=calls))
