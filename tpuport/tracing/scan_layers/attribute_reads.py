"""A record of the attributes that a block's code reads, among those in which blocks differ."""

import contextlib
import functools
from collections.abc import Iterator

from tpuport.tracing.guards.attribute_proxy import RecordingAttributes, hide, show
from tpuport.tracing.scan_layers.families import Member


def _note_read(reads: set[tuple[str, str]], fqn: str, name: str) -> None:
    reads.add((fqn, name))


@contextlib.contextmanager
def withheld(member: Member, reads: set[tuple[str, str]]) -> Iterator[None]:
    """Record which attributes the code inside reads, of those that differ between blocks.

    Reads for blocks around this one are recorded too.
    """
    by_module: dict[str, set[str]] = {}
    for fqn, name in member.varying:
        by_module.setdefault(fqn, set()).add(name)
    hidden = []
    for fqn, module in member.modules:
        names = by_module.get(fqn, set())
        if names or type(module.__dict__) is RecordingAttributes:
            # Python would find an attribute of the class first, and the read would go unrecorded.
            on_class = {name for name in names if hasattr(type(module), name)}
            reads.update((fqn, name) for name in on_class)
            read = functools.partial(_note_read, reads, fqn)
            hidden.append((module, hide(module, names - on_class, read)))
    try:
        yield
    finally:
        for module, before in reversed(hidden):
            show(module, before)


def note_reads(member: Member, reads: set[tuple[str, str]]) -> None:
    """Record, for the blocks around one, the attributes that its code would have read."""
    modules = dict(member.modules)
    for fqn, name in reads:
        held = modules[fqn].__dict__
        if type(held) is RecordingAttributes and name in held.hidden:
            held.read(name)
