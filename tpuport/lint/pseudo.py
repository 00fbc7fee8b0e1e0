"""The findings that are not about PyTorch but about tpuport's own comments."""

from collections.abc import Iterator, Sequence

from tpuport.lint.records import Checked, Ignore, Reported
from tpuport.lint.settings import Settings
from tpuport.lint.spelling import nearest
from tpuport.source.rewrite.finding import Severity


class UnusedIgnore:
    """A comment that ignores nothing.

    ## What it does
    Finds `# tpuport: ignore` and `# tpuport: ignore-file` comments, with or without codes, where no
    finding is left to ignore; codes in them that no rule has; and misspelt ones.

    ## Why is this bad?
    Such a comment hides the next finding on its line, which may be one to know of, and says of
    code that it needs an exception when it does not.

    ## Fix safety
    There is no automatic fix. Delete the comment, or the code in its brackets. A code counts as
    unused only in a run that looks for it: with `--select TPU1` a comment for TPU501 is left alone.

    ## References
    docs/lint.md
    """

    CODE = "TPU001"
    MESSAGE = "`{comment}` ignores nothing"
    SEVERITY = Severity.NOTE


def unused_ignores(
    checked: Checked, settings: Settings, enabled: Sequence[Reported], known: Sequence[str]
) -> Iterator[Reported]:
    """Yield a finding for each ignore comment of a file that is unused or misspelt.

    Args:
        checked: The file.
        settings: The selection of codes.
        enabled: The selected findings of the file, with the ignored ones.
        known: The codes of all rules.
    """
    for number, ignore in enumerate(checked.ignores):
        codes = {finding.code for finding in enabled if number in finding.ignored}
        for message in _complaints(ignore, codes, settings, known):
            yield Reported(
                file=checked.file,
                cell=ignore.cell,
                line=ignore.line,
                column=ignore.column,
                end_line=ignore.line,
                end_column=ignore.column + len(ignore.text),
                code=UnusedIgnore.CODE,
                rule=UnusedIgnore.__name__,
                severity=UnusedIgnore.SEVERITY,
                message=message,
                lines=(ignore.source,),
            )


def _complaints(
    ignore: Ignore, used: set[str], settings: Settings, known: Sequence[str]
) -> Iterator[str]:
    if ignore.unknown:
        yield f"`{ignore.text}` is misspelt: write `# tpuport: ignore` or `ignore-file`"
        return
    if not ignore.codes:
        if not used and all(settings.selects(code) for code in known):
            yield UnusedIgnore.MESSAGE.format(comment=ignore.text)
        return
    unknown = [code for code in ignore.codes if code not in known]
    for code in unknown:
        near = nearest(code, list(known))
        hint = f"; did you mean {near}?" if near else ""
        yield f"`{ignore.text}` names {code}, which is no rule's code{hint}"
    idle = [code for code in ignore.codes if code in known and settings.selects(code)]
    idle = [code for code in idle if code not in used]
    if idle and set(idle) == set(ignore.codes):
        yield UnusedIgnore.MESSAGE.format(comment=ignore.text)
    elif idle:
        yield f"`{ignore.text}` ignores nothing with {', '.join(idle)}"
