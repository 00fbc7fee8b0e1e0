"""Random programs do the same after rewriting, whichever way their branches go.

Every test in them calls a function that logs the call and answers at random, so that a difference
in order, number or outcome of evaluations shows. Names may be unbound and calls may raise.
"""

import os
import random
import re
import textwrap

import pytest

from tpuport.rules._apply import rewrite
from tpuport.source.inference.kinds import ObservedKinds

PROGRAMS = int(os.environ.get("TPUPORT_FUZZ", "300"))
RUNS = 5
NAMES = "abcd"


class Generator:
    """Programs of one function `forward(a, b, c)`, from the grammar that the rules rewrite."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0

    def number(self) -> int:
        self.count += 1
        return self.count

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def name(self) -> str:
        return self.random.choice(NAMES)

    def two_names(self) -> str:
        # Not one name twice: CPython 3.11.2 itself compiles `a, a = x, y` to what leaves x in a.
        return ", ".join(self.random.sample(NAMES, 2))

    def comment(self) -> str:
        return f"  # c{self.number()}" if self.chance(0.15) else ""

    def atom(self) -> str:
        number = self.random.randrange(3)
        return self.random.choice([self.name(), self.name(), f"{number}", f"f({self.number()})"])

    def expression(self, depth: int = 2) -> str:
        forms = [
            lambda: f"({self.expression(depth - 1)} + {self.expression(depth - 1)})",
            lambda: f"({self.expression(depth - 1)} if {self.test(depth - 1)} else {self.atom()})",
            lambda: f"({self.test(depth - 1)} and {self.expression(depth - 1)})",
            lambda: f"({self.expression(depth - 1)} or {self.test(depth - 1)})",
            lambda: f"({self.name()} := {self.expression(depth - 1)})",
            lambda: f"(not {self.test(depth - 1)})",
            lambda: f"sum({self.name()} for i in range(2))",
            lambda: f"(lambda: {self.name()})()",
            lambda: f"len([i for i in range(2) if {self.test(0)}])",
        ]
        if depth == 0 or self.chance(0.5):
            return self.atom()
        weights = [4, 4, 2, 2, 1, 1, 0.5, 0.3, 0.3]
        return self.random.choices(forms, weights)[0]()

    def test(self, depth: int = 2) -> str:
        forms = [
            lambda: f"not {self.test(depth - 1)}",
            lambda: f"({self.test(depth - 1)} and {self.test(depth - 1)})",
            lambda: f"({self.test(depth - 1)} or {self.test(depth - 1)})",
            lambda: f"{self.atom()} < {self.expression(depth - 1)} < {self.atom()}",
            lambda: f"({self.name()} := {self.expression(depth - 1)})",
            lambda: f"{self.name()} is not None and {self.test(depth - 1)}",
            lambda: self.expression(depth - 1),
        ]
        if depth == 0 or self.chance(0.5):
            return f"t({self.number()}, {self.atom()})"
        return self.random.choices(forms, [1, 1, 1, 1, 0.3, 1, 1])[0]()

    def block(self, depth: int, in_loop: bool) -> list[str]:
        count = self.random.choice([1, 1, 2, 3])
        return [line for _ in range(count) for line in self.statement(depth, in_loop)]

    def indented(self, head: str, depth: int, in_loop: bool) -> list[str]:
        return [head, *("    " + line for line in self.block(depth, in_loop))]

    def statement(self, depth: int, in_loop: bool) -> list[str]:
        if depth > 0 and self.chance(0.5):
            return self.compound(depth - 1, in_loop)
        forms = [
            lambda: f"{self.name()} = {self.expression()}{self.comment()}",
            lambda: f"{self.name()} += {self.expression(1)}",
            lambda: f"{self.two_names()} = {self.expression(1)}, {self.expression(1)}",
            lambda: f"return {self.expression()}",
            lambda: f"assert {self.test()}, f({self.number()})",
            lambda: f"raise KeyError({self.expression(1)})",
            lambda: f"print({self.expression(1)})",
            lambda: self.random.choice(["continue", "continue", "break"]) if in_loop else "pass",
            lambda: f'{self.name()} = len("""x{self.comment()}\n  y""")',
            lambda: f"log.append({self.atom()})",
            lambda: f"del {self.name()}",
            lambda: f"g = lambda: {self.name()}",
        ]
        weights = [8, 2, 1, 2, 1, 1, 0.7, 2, 0.5, 0.3, 0.1, 0.1]
        return self.random.choices(forms, weights)[0]().split("\n")

    def compound(self, depth: int, in_loop: bool) -> list[str]:
        kind = self.random.choices(["if", "for", "while", "try", "with"], [8, 1, 1, 1, 0.5])[0]
        if kind == "for":
            return self.indented(f"for {self.name()} in range(2):", depth, True)
        if kind == "while":
            name = f"n{self.number()}"
            first, *rest = self.indented(f"while {name} < 2 and {self.test(1)}:", depth, True)
            return [f"{name} = 0", first, f"    {name} += 1", *rest]
        if kind == "try":
            last = self.random.choice(["except KeyError:", "finally:"])
            in_last = in_loop and last != "finally:"
            tried = self.indented("try:", depth, in_loop)
            return tried + self.indented(last, depth, in_last)
        if kind == "with":
            return self.indented(f"with context() as {self.name()}:", depth, in_loop)
        lines = self.indented(f"if {self.test()}:{self.comment()}", depth, in_loop)
        while self.chance(0.25):
            lines += self.indented(f"elif {self.test()}:", depth, in_loop)
        if self.chance(0.5):
            lines += self.indented(f"else:{self.comment()}", depth, in_loop)
        return lines

    def program(self) -> str:
        lines = [line for _ in range(3) for line in self.statement(3, False)]
        body = "\n".join(["d = f(0)", *lines, "return a, b, c, d"])
        return "def forward(a, b=1, c=2):\n" + textwrap.indent(body, "    ") + "\n"


def run(source: str, seed: int) -> tuple[str, list[object]]:
    """The outcome of a program and the log of everything that it called."""
    choices = random.Random(seed)
    log: list[object] = []

    def called(*values: object) -> int:
        log.append(values)
        return choices.randrange(4)

    class Context:
        def __enter__(self) -> int:
            return called("enter")

        def __exit__(self, kind: type | None, *_: object) -> bool:
            # A name without a value: which NameError it is depends on where Python looked for it.
            log.append(NameError if kind is not None and issubclass(kind, NameError) else kind)
            return kind is KeyError and called("exit") > 1

    names = {
        "f": called,
        "t": lambda *values: called(*values) > 1,
        "context": Context,
        "print": lambda *values: log.append(("print", values)),
        "log": log,
    }
    exec(compile(source, "<program>", "exec"), names)
    try:
        outcome = repr(names["forward"](seed))
    except NameError:
        outcome = "NameError"
    except Exception as error:
        outcome = repr(error)
    return outcome, log


def comments(source: str) -> list[str]:
    return sorted(re.findall(r"# c\d+", source))


def lines_of(source: str) -> range:
    return range(1, source.count("\n") + 2)


@pytest.fixture(scope="module")
def fixed() -> dict[str, int]:
    """How many fixes of each form all programs together had."""
    return {}


# The others have every form of a fix, which the test after this one counts, and run the same lines.
FOR_TEST_ALL = {150, 175, 225, 250, 275}


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start, marks=[pytest.mark.slow] * (start in FOR_TEST_ALL))
        for start in range(0, PROGRAMS, 25)
    ],
)
def test_programs_do_the_same_after_rewriting(start: int, fixed: dict[str, int]):
    for seed in range(start, start + 25):
        source = Generator(seed).program()
        result = rewrite(source, kinds=ObservedKinds(lines_of(source)))
        for applied in result.applied:
            known = r"return tpuport.ops.cond|def [a-z_]+|ops\.\w+|left = 1"
            forms = set(re.findall(known, applied.after))
            assert forms
            for form in forms:
                fixed[form] = fixed.get(form, 0) + 1
        assert comments(result.source) == comments(source)
        for run_seed in range(RUNS):
            before, after = run(source, run_seed), run(result.source, run_seed)
            assert before == after, f"program {seed}, run {run_seed}:\n{source}\n{result.source}"


def test_the_programs_met_every_form_of_fix(fixed: dict[str, int]):
    for form in ("def if_true", "return tpuport.ops.cond", "def loop_test", "ops.cond"):
        assert fixed.get(form, 0) >= 10, fixed
    for form in ("ops.passes", "ops.check", "ops.report", "ops.negate", "ops.first_falsy"):
        assert fixed.get(form, 0) >= 5, fixed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return y\n\n    def if_false", "return x\n\n    def if_false"),
        ("if_true, if_false", "if_false, if_true"),
        ("both(t(1, x), lambda: t(2, y))", "either(t(1, x), lambda: t(2, y))"),
        ("lambda: t(2, y)", "(lambda known: lambda: known)(t(2, y))"),
    ],
)
def test_a_wrong_rewrite_would_be_noticed(old: str, new: str):
    source = textwrap.dedent("""
        def forward(x):
            y = f(3)
            if t(1, x) and t(2, y):
                y = x + 5
            else:
                y = y - 5
            return y
    """)
    after = rewrite(source, kinds=ObservedKinds(lines_of(source))).source
    mutant = after.replace(old, new)
    assert mutant != after
    assert all(run(source, seed) == run(after, seed) for seed in range(20))
    assert any(run(source, seed) != run(mutant, seed) for seed in range(20))
