"""Collectives of a compiled program, counted in its text."""

import re
from collections import Counter

from tpuport.cost.hlo.parser import Instruction, read_program

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def collective_kind(opcode: str) -> str | None:
    """Return the kind of collective that an HLO opcode is or starts, or None.

    An asynchronous one is two instructions or more, of which the first counts.
    """
    kind = opcode.removesuffix("-start").removeprefix("ragged-")
    return kind if kind in KINDS else None


def collective_id(one: Instruction) -> str:
    """Return an identifier of a collective within a program: most often its own name.

    libtpu may split one collective over the steps of several fusions. Each step has an instruction
    of its own, with the same channel and chain.
    """
    chain = re.search(r'\bchain_id="(\w+)"', one.attributes)
    channel = re.search(r"\bchannel_id=(\d+)", one.attributes)
    return f"channel {channel[1]}, chain {chain[1]}" if chain and channel else one.name


def count_collectives(text: str) -> dict[str, int]:
    """Count how often each kind of collective occurs in the text of a compiled program.

    Args:
        text: `compiled.as_text()`, HLO after the SPMD partitioner. The body of a loop occurs once,
            however often it runs: `tpuport.cost.read_compiled` counts runs and bytes.

    Returns:
        The count of each kind that occurs.
    """
    found = {
        (collective_kind(one.opcode), collective_id(one))
        for one in read_program(text).instructions()
    }
    counts = Counter(kind for kind, _ in found)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}
