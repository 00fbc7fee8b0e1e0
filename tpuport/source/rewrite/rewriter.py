"""Application of the rules' fixes to text, in passes until no fix is left to apply."""

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpuport.foundation.errors import TpuportError
from tpuport.source.inference.inference import StaticKinds
from tpuport.source.inference.kinds import Oracle
from tpuport.source.rewrite import imports
from tpuport.source.rewrite.finding import Applied, Fix, Left, NotFixable
from tpuport.source.rewrite.matching import (
    ABOUT_DEVICES,
    Context,
    Match,
    RuleVisitor,
    matches,
    normal_line_breaks,
)
from tpuport.source.syntax.module import Module, is_in_f_string
from tpuport.source.syntax.text import SourceText

# Passes in a row that may bring nothing. Nested code settles by a finding or more a pass, so this
# ends only rules that undo each other or find their own output.
MAX_IDLE_PASSES = 10

# Takes a parsed text and returns a predicate that tells which of its findings to leave alone.
Ignored = Callable[[Module], Callable[[Match], bool]]


_BREAK = re.compile(r"\r\n|\r|\n")


class NotSettledError(TpuportError):
    """Raised when rules keep finding something in the code that they rewrote."""


@dataclass(frozen=True)
class RewriteResult:
    """Rewritten source, with the fixes made and the findings left.

    Attributes:
        source: The new text; the unchanged input if nothing was applied.
        applied: The fixes made, in the order of their place in the original.
        left: The findings that stay, each with the reason.
    """

    source: str
    applied: list[Applied]
    left: list[Left]


def rewrite(
    source: str,
    *,
    rules: Sequence[type[RuleVisitor]],
    kinds: Oracle | None = None,
    file: str = "<string>",
    unsafe: bool = False,
    ignored: Ignored | None = None,
) -> RewriteResult:
    """Apply the fixes of rules to Python source. Rewriting the result again changes nothing.

    Args:
        source: The text of a file.
        rules: The rules to apply.
        kinds: What decides which expressions are traced; `StaticKinds()` if left out.
        file: What findings name as the file.
        unsafe: Whether to apply fixes that are not the same for every input, too.
        ignored: Says of a parsed text, which changes with every pass, which findings the user wants
            left alone. Code that would have to stay if they had no fix stays too.

    Raises:
        SyntaxError: the source is not Python.
        NotSettledError: rules undo each other's work.
    """
    text = SourceText(normal_line_breaks(source))
    session = Session(
        [rule() for rule in rules],
        kinds or StaticKinds(),
        file=file,
        unsafe=unsafe,
        ignored=ignored,
    )
    text = session.run(text)
    if not session.applied:
        return RewriteResult(source, [], session.left)
    return RewriteResult(_with_breaks_of(source, text), session.applied, session.left)


def prospects(context: Context, found: list[Match]) -> list[tuple[Match, str]]:
    """Return the findings that have a fix now, each with the name of the fix's safety."""
    session = Session((), StaticKinds(), file=context.module.file, unsafe=True)
    return [(match, match.rule.SAFETY.name) for match, _ in session.possible(found, context)]


def _with_breaks_of(source: str, text: SourceText) -> str:
    """Return the text with the line breaks that the original lines have in `source`."""
    breaks = _BREAK.findall(source) or ["\n"]
    ends = [breaks[min(origin, len(breaks)) - 1] for origin in text.origins[:-1]]
    return "".join(line + end for line, end in zip(text.lines, [*ends, ""], strict=True))


class Session:
    """One run over one text: passes until no fix applies, with a record of the fixes.

    Args:
        rules: The rules to apply.
        kinds: The oracle that decides which expressions are traced.
        file: The file name that findings carry.
        unsafe: Whether to apply unsafe fixes.
        imports_inside: Whether to import inside the outermost function and not at the top.
        ignored: Tells which findings of a parsed text the user wants left alone.
    """

    def __init__(
        self,
        rules: Sequence[RuleVisitor],
        kinds: Oracle,
        *,
        file: str,
        unsafe: bool = False,
        imports_inside: bool = False,
        ignored: Ignored | None = None,
    ) -> None:
        self.rules, self.kinds, self.file = rules, kinds, file
        self.unsafe, self.imports_inside, self.ignored = unsafe, imports_inside, ignored
        self.applied: list[Applied] = []
        self.left: list[Left] = []

    def run(self, text: SourceText) -> SourceText:
        """Rewrite a text in passes until no rule has a fix to apply.

        Raises:
            NotSettledError: the passes do not end.
        """
        needed: set[str] = set()
        fewest, idle = None, 0
        while True:
            module = Module(text.text, file=self.file, text=text)
            context = self._context(module)
            found = matches(context, self.rules)
            chosen = self._choose(found, context)
            if not chosen:
                self.applied.sort(key=lambda applied: applied.finding)
                self.left.sort(key=lambda left: left.finding)
                return imports.add(module, needed, inside=self.imports_inside)
            if fewest is None or len(found) < fewest:
                fewest, idle = len(found), 0
            else:
                idle += 1
            if idle > MAX_IDLE_PASSES:
                raise self._not_settled([match for match, _ in chosen])
            for match, fix in chosen:
                needed.update(fix.imports)
                self.applied.append(_account(match, fix, module))
            text = _apply(module, [fix for _, fix in chosen])

    def _context(self, module: Module) -> Context:
        return Context(module, self.kinds.bind(module), imports_inside=self.imports_inside)

    def possible(self, found: list[Match], context: Context) -> list[tuple[Match, Fix]]:
        """Return the fixes that can be made, and store the other findings in `left`."""
        fixes: list[tuple[Match, Fix]] = []
        stuck: list[tuple[Match, NotFixable]] = []
        ignored = self.ignored(context.module) if self.ignored else None
        for match in found:
            try:
                if ignored is not None and ignored(match):
                    raise NotFixable("a comment asks to ignore it")
                fixes.append((match, self._fix(match, context)))
            except NotFixable as obstacle:
                stuck.append((match, obstacle))
        fixes, pinned = _without_pinned(fixes, stuck, context.module)
        self.left = [Left(match.finding, obstacle.reason) for match, obstacle in stuck + pinned]
        return fixes

    def _choose(self, found: list[Match], context: Context) -> list[tuple[Match, Fix]]:
        """Choose the fixes of this pass: the smallest ones that do not overlap."""
        fixes = self.possible(found, context)
        fixes.sort(key=lambda pair: pair[1].end - pair[1].start)
        chosen: list[tuple[Match, Fix]] = []
        for match, fix in fixes:
            if all(fix.end <= other.start or other.end <= fix.start for _, other in chosen):
                chosen.append((match, fix))
        # The fixes are made again in the order of the text, so that fresh names have no gaps.
        context.module.forget_names()
        chosen.sort(key=lambda pair: pair[1].start)
        return [(match, match.rule.fix(match.node, context)) for match, _ in chosen]

    def _fix(self, match: Match, context: Context) -> Fix:
        if match.rule.SAFETY.name == "unsafe" and not self.unsafe:
            raise NotFixable("its fix is unsafe and was not asked for")
        if is_in_f_string(match.node, context.module):
            raise NotFixable("it stands inside an f-string")
        if not match.rule.CODE.startswith(ABOUT_DEVICES) and context.is_off_tpu(match.node):
            raise NotFixable("only GPUs run this function, for the kernels that it calls")
        fix = match.rule.fix(match.node, context)
        imports.check(context.module, fix.imports, inside=self.imports_inside, place=fix.start)
        return fix

    def _not_settled(self, chosen: list[Match]) -> NotSettledError:
        rules = ", ".join(sorted({f"{m.finding.code} {m.finding.rule}" for m in chosen}))
        first = min(match.finding for match in chosen)
        return NotSettledError(
            f"{first.file}:{first.line}: rewriting does not settle: after {MAX_IDLE_PASSES} more"
            f" passes there is still work for {rules}. What to do: report this as a bug of"
            " tpuport, with that function; --ignore one of these rules meanwhile."
        )


def _without_pinned(
    fixes: list[tuple[Match, Fix]], stuck: list[tuple[Match, NotFixable]], module: Module
) -> tuple[list[tuple[Match, Fix]], list[tuple[Match, NotFixable]]]:
    """Split fixes into those that leave pinned code alone and those that would move it."""
    pins = [
        (module.span(match.node), match.finding.line)
        for match, obstacle in stuck
        if match.rule.PINS and obstacle.pins
    ]
    kept: list[tuple[Match, Fix]] = []
    pinned: list[tuple[Match, NotFixable]] = []
    for match, fix in fixes:
        lines = [
            line for (a, b), line in pins if any(e.start <= a and b <= e.end for e in fix.edits)
        ]
        if lines:
            reason = f"it encloses line {lines[0]}, which cannot be rewritten"
            pinned.append((match, NotFixable(reason)))
        else:
            kept.append((match, fix))
    return kept, pinned


def _apply(module: Module, fixes: list[Fix]) -> SourceText:
    edits = [edit for fix in fixes for edit in fix.edits]
    made = module.copy(0, len(module.text.text), edits)
    origins = [line.origin for line in made.lines]
    return SourceText(made.text, origins, module.text.original)


def _account(match: Match, fix: Fix, module: Module) -> Applied:
    first, last = module.text.line_at(fix.start), module.text.line_at(fix.end)
    start, end = module.text.line_start(first), module.text.line_end(last)
    before = textwrap.dedent(module.text.text[start:end])
    after = textwrap.dedent(module.copy(start, end, fix.edits).text)
    return Applied(match.finding, before, after, match.rule.SAFETY.name)
