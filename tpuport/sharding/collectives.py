"""What a compiled program communicates, counted in its text."""

import re
from collections import Counter

from tpuport.sharding.hlo_text import Instruction, read_program

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def collective_kind(opcode: str) -> str | None:
    """The kind of collective that an HLO opcode is or starts.

    An asynchronous one is two instructions or more, of which the first counts.
    """
    kind = opcode.removesuffix("-start").removeprefix("ragged-")
    return kind if kind in KINDS else None


def collective_id(one: Instruction) -> str:
    """What names a collective among all of a program: most often its own name.

    libtpu spreads one over the steps of several fusions, each with an instruction of its own of the
    same channel and chain.
    """
    chain = re.search(r'\bchain_id="(\w+)"', one.attributes)
    channel = re.search(r"\bchannel_id=(\d+)", one.attributes)
    return f"channel {channel[1]}, chain {chain[1]}" if chain and channel else one.name


def count_collectives(text: str) -> dict[str, int]:
    """How often each kind of collective stands in the text of a compiled program.

    Args:
        text: `compiled.as_text()`, HLO after the SPMD partitioner. The body of a loop stands there
            once, however often it runs: `tpuport.program.cost.read_compiled` counts runs and bytes.

    Returns:
        Only the kinds that are there.
    """
    found = {
        (collective_kind(one.opcode), collective_id(one))
        for one in read_program(text).instructions()
    }
    counts = Counter(kind for kind, _ in found)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}
