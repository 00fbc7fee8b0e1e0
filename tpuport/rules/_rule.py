"""The declarations of a rule file: its rule and its examples."""

import textwrap
from dataclasses import dataclass
from typing import ClassVar

from tpuport.source.rewrite.matching import RuleVisitor

HEADINGS = ("What it does", "Why is this bad?", "Fix safety", "References")


@dataclass(frozen=True)
class Example:
    """Code that a rule finds, and its rewriting. All strings: rule files import no framework.

    Attributes:
        before: A module that defines a function `forward`; common indentation does not count.
        after: The same module rewritten, to the letter; None where there is no fix.
        inputs: An expression for the tuple of tensors to call `forward` with, such as
            `(torch.randn(3, 4),)`. It is evaluated once for each seed.
        jit_error: The exception that plain torchax raises under `jax.jit` for `before`, or when the
            module is imported; None where it raises none. So a needless rule fails its own test.
        harm: The fault where there is no exception: a name of `testing/harms.py`.
        reference: A module that computes what `before` does where its devices exist, for code that
            cannot run on a CPU; `before` itself if left out.
        left: Part of the reason why there is no fix, where `after` is None.
        plain_harm: The fault that `after` still has under plain torchax: a name of
            `testing/harms.py`.
        plain_error: The exception that plain torchax still raises for `after`, which only
            `tpuport.convert` can run.
    """

    before: str
    after: str | None = None
    inputs: str = "(torch.randn(3, 4),)"
    jit_error: str | None = "ConcretizationTypeError"
    harm: str | None = None
    reference: str | None = None
    left: str | None = None
    plain_error: str | None = None
    plain_harm: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", _text(self.before))
        for name in ("after", "reference"):
            source = getattr(self, name)
            if source is not None:
                object.__setattr__(self, name, _text(source))


def _text(source: str) -> str:
    return textwrap.dedent(source).lstrip("\n")


class Rule(RuleVisitor):
    """Base of all rules.

    A subclass is named after the pattern it looks for, as in "allow TensorBranch", and its file
    after the class. Its docstring has the headings of `HEADINGS`. Methods `visit_X(node, context)`
    are called for every node of class `ast.X` and report with `context.report(self, node)`.

    Attributes:
        CODE: Unique and never reused: TPU1 concretization, TPU2 data-dependent shape, TPU3 host
            transfer, TPU4 trace-time state and randomness, TPU5 device assumptions, TPU6 recompile
            and speed, TPU7 torch_xla; then two digits.
        MESSAGE: The message; its placeholders are the keyword arguments of `context.report`.
        SAFETY: How close rewritten code stays to the original.
        SEVERITY: The consequence for the program if the finding stays.
        LIVE: Whether `convert` asks the rule to rewrite a line that its trace cannot run.
        PINS: Whether code around a finding without a fix must stay as it is too.
        EXAMPLES: Code that is found and, where there is a fix, rewritten.
        CLEAN: Modules that look alike and must stay.
    """

    LIVE: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[Example, ...]]
    CLEAN: ClassVar[tuple[str, ...]]
