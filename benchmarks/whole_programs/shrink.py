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
            if _compiles(smaller) and shows(smaller):
                program, found = smaller, True
                break
    return program


def _compiles(program: Program) -> bool:
    """Return whether Python takes it: without its loop, a `continue` is a syntax error."""
    try:
        compile(program.source(), "<program>", "exec")
    except SyntaxError:
        return False
    return True


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs with one thing less, the greatest steps first."""
    count = len(program.calls)
    for index in range(count if count > 1 else 0):
        left = program.calls[:index] + program.calls[index + 1 :]
        yield replace(program, calls=left)
    nodes = [node for top in program.body for node in top.walk()]
    statements = [node for node in nodes if node.kind == "statement"]
    for node in (*program.body, *statements):
        yield _with(program, node, [])
    for node in statements:
        for block in node.blocks:
            yield _with(program, node, block)
    for node in nodes:
        if node.parts and node.kind != "statement":
            same = [part for part in node.parts if part.kind == node.kind]
            for part in (*same, Node(node.kind, grammar.LEAVES[node.kind][0])):
                yield _with(program, node, [part])


def _with(program: Program, old: Node, new: list[Node]) -> Program:
    body = [n for top in program.body for n in top.replaced(old, new)]
    return replace(program, body=body)
