"""The check of one file: the part of a run that needs no other file."""

import ast
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpuport.lint.comments import Directive, find_directives
from tpuport.lint.notebooks import Notebook
from tpuport.lint.records import Checked, Ignore, Problem, Reported
from tpuport.lint.sources import Source, UnreadableError, read_source
from tpuport.source.inference.cross_file import find_reached, summarise
from tpuport.source.inference.inference import Inference
from tpuport.source.inference.roles import Roles
from tpuport.source.rewrite.matching import Context, Match, matches, normal_line_breaks
from tpuport.source.rewrite.rewriter import prospects
from tpuport.source.syntax.module import FUNCTIONS, Module

MAX_EXCERPT = 6


def check(data: bytes, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Find every finding of every rule in one file, and summarise it for other files.

    The user's selection of rules and severities is applied later, so that the answer can be cached.
    A file that cannot be linted has an answer too, with a problem in it.

    Args:
        data: The content of the file.
        name: Its name with the folders around it, as `tail` returns it: code in `tests` or `data`
            is run by the host.
        options: `strict`, whether values of unknown kind count as traced inside a step; `facts`,
            the functions of the file that only steps in other files reach, `own`, the packages
            for CUDA that the linted code itself is, if there are any, and `fixes`, whether to say
            which findings have a fix, true if left out.

    Returns:
        As JSON: `checked` as of `Checked.to_json`, and `summary` for `connect`, null where the file
        cannot be read.
    """
    reached = frozenset(options.get("facts", ()))
    try:
        checked, summary = _check(read_source(data, name), name, options, reached)
        return {"checked": checked.to_json(), "summary": summary}
    except UnreadableError as error:
        problem = Problem("", error.reason, error.trouble)
    except SyntaxError as error:
        place = f" in line {error.lineno}" if error.lineno else ""
        problem = Problem("", f"no Python 3 that can be read{place}: {error.msg}")
    except RecursionError:
        problem = Problem("", "nested too deeply to be read")
    except MemoryError:
        problem = Problem("", "nested too deeply, or too large for the available memory")
    return {"checked": Checked("", problems=(problem,)).to_json(), "summary": None}


def tail(path: Path) -> str:
    """Return the part of a path that shows what a file is for: its name and two folders."""
    return "/".join(path.parts[-3:])


def connect(summaries: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return for each file the functions that only steps in other files reach, if there are any.

    Args:
        summaries: The summary of each file that could be read, by path.
    """
    reached = find_reached(summaries)
    extra = {
        file: sorted(reached[file].difference(summary["steps"]))
        for file, summary in summaries.items()
    }
    return {file: names for file, names in extra.items() if names}


def parse(source: Source, name: str = "") -> Module:
    """Parse a file.

    Raises:
        SyntaxError: it is not Python.
    """
    with warnings.catch_warnings():
        # Warnings about invalid escapes in strings are for other linters.
        warnings.simplefilter("ignore")
        return Module(normal_line_breaks(source.text), file=name, newer=True)


def _check(
    source: Source, name: str, options: Mapping[str, Any], reached: frozenset[str]
) -> tuple[Checked, dict[str, Any]]:
    # Imported late: an answer from the cache needs no rules.
    from tpuport.rules._discovery import find_rules

    module = parse(source, name)
    kinds = Inference(module, Roles(module, reached=reached))
    own = frozenset(options.get("own", ()))
    context = Context(module, kinds, strict=options["strict"], own=own)
    found = matches(context, [rule() for rule in find_rules()])
    asked = options.get("fixes", True) and not module.is_newer
    fixes = prospects(context, found) if asked else []
    safeties = {id(match): safety for match, safety in fixes}
    directives = find_directives(module.text.text)
    steps = _steps(context)
    findings = [
        _reported(match, context, safeties.get(id(match), ""), directives, steps) for match in found
    ]
    ignores = tuple(directive.ignore for directive in directives)
    problems: tuple[Problem, ...] = ()
    if source.notebook is not None:
        notebook = source.notebook
        findings = [_in_cell(finding, notebook) for finding in findings]
        ignores = tuple(_ignore_in_cell(ignore, notebook) for ignore in ignores)
        problems = tuple(
            Problem("", f"cell {number} is no Python that can be read, {reason}")
            for number, reason in notebook.broken
        )
    ordered = tuple(sorted(set(findings), key=lambda finding: finding.key))
    checked = Checked("", ordered, ignores, problems, len(steps), tuple(sorted(reached)))
    return checked, dict(summarise(module, None if reached else kinds.roles))


def _steps(context: Context) -> dict[ast.AST, int]:
    """Return the outermost functions of traced steps, each with its line."""
    module = context.module
    found: dict[ast.AST, int] = {}
    pending: list[ast.AST] = [module.tree]
    while pending:
        node = pending.pop()
        if isinstance(node, FUNCTIONS):
            if context.in_step(node):
                found[node] = node.lineno
        elif not isinstance(node, ast.expr):
            pending.extend(ast.iter_child_nodes(node))
    return found


def _reported(
    match: Match,
    context: Context,
    safety: str,
    directives: Sequence[Directive],
    steps: Mapping[ast.AST, int],
) -> Reported:
    found, lines = match.finding, context.module.text.lines
    ignored = tuple(
        number
        for number, directive in enumerate(directives)
        if directive.covers(found.code, found.line, found.end_line)
    )
    last = min(found.end_line, found.line + MAX_EXCERPT - 1)
    return Reported(
        file="",
        line=found.line,
        column=found.column,
        end_line=found.end_line,
        end_column=found.end_column,
        code=found.code,
        rule=found.rule,
        severity=found.severity,
        message=found.message,
        safety=safety,
        function=steps.get(context.module.outermost_function(match.node), 0),
        lines=tuple(lines[found.line - 1 : last]),
        ignored=ignored,
    )


def _in_cell(finding: Reported, notebook: Notebook) -> Reported:
    cell, line = notebook.place(finding.line)
    _, end_line = notebook.place(finding.end_line)
    return replace(finding, cell=cell, line=line, end_line=end_line)


def _ignore_in_cell(ignore: Ignore, notebook: Notebook) -> Ignore:
    cell, line = notebook.place(ignore.line)
    return replace(ignore, cell=cell, line=line)
