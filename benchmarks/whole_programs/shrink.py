"""Makes a program that shows a find smaller, for as long as it still shows it."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.whole_programs import grammar
from benchmarks.whole_programs.programs import Node, Program


def shrink(program: Program, shows: Callable[[Program], bool], most: int = 80) -> Program:
    """Return a smaller program.

    Args:
        program: what to shrink.
        shows: says whether a program shows the find.
        most: how many programs are tried.
    """
    tried = 0
    found = True
    while found:
        found = False
        for smaller in _smaller(program):
            if tried >= most:
                return program
            tried += 1
            if shows(smaller):
                program, found = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs with one thing less, the greatest steps first."""
    if len(program.calls) > 1:
        for index in range(len(program.calls)):
            left = program.calls[:index] + program.calls[index + 1 :]
            yield replace(program, calls=left, graded=min(program.graded, len(left) - 1))
    for node in program.body:
        yield _with(program, node, [])
    for node in [n for top in program.body for n in top.walk()]:
        if node.kind == "statement":
            yield _with(program, node, [])
            for block in node.blocks:
                yield _with(program, node, block)
    for node in [n for top in program.body for n in top.walk()]:
        if node.kind == "statement" or not node.parts:
            continue
        for part in node.parts:
            if part.kind == node.kind:
                yield _with(program, node, [part])
        yield _with(program, node, [Node(node.kind, grammar.LEAVES[node.kind][0])])


def _with(program: Program, old: Node, new: list[Node]) -> Program:
    body = [n for top in program.body for n in top.replaced(old, new)]
    return replace(program, body=body)
