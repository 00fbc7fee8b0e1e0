"""Selection of the findings that the user asked to see."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tpuport.lint.baseline import Baseline
from tpuport.lint.pseudo import UnusedIgnore, unused_ignores
from tpuport.lint.records import RANK, Checked, Outcome, Problem, Reported
from tpuport.lint.settings import Settings


def decide(
    checked: Sequence[Checked],
    settings: Settings,
    *,
    known: Sequence[str],
    baseline: Baseline | None = None,
    problems: Sequence[Problem] = (),
) -> Outcome:
    """Decide what a run shows.

    Args:
        checked: All findings, file by file.
        settings: The user's selection.
        known: The codes of all rules.
        baseline: The findings not to show again.
        problems: Problems in addition to those in `checked`.
    """
    counted = sorted(
        (finding for one in checked for finding in _of_file(one, settings, known)),
        key=lambda finding: finding.key,
    )
    loud = [finding for finding in counted if is_loud(finding, settings)]
    hidden = Counter(f.severity for f in counted if not is_loud(f, settings))
    shown, baselined, stale = tuple(loud), 0, 0
    if baseline is not None:
        compared = baseline.compare(loud, [one.file for one in checked])
        shown, baselined, stale = compared.new, compared.known, compared.gone
    outcome = Outcome(
        shown=shown,
        counted=tuple(f for f in counted if f.code != UnusedIgnore.CODE),
        hidden={severity.value: hidden[severity] for severity in RANK if hidden[severity]},
        baselined=baselined,
        stale=stale,
        functions=sum(one.functions for one in checked),
        files=len(checked),
    )
    return outcome.with_problems((*problems, *(p for one in checked for p in one.problems)))


def is_loud(finding: Reported, settings: Settings) -> bool:
    """Return whether a finding is severe enough to show; those about comments always are."""
    return finding.code == UnusedIgnore.CODE or RANK[finding.severity] <= RANK[settings.severity]


def _of_file(one: Checked, settings: Settings, known: Sequence[str]) -> list[Reported]:
    path = Path(one.file)
    codes = {finding.code for finding in one.findings} | {UnusedIgnore.CODE}
    asked = {code for code in codes if settings.selects_in(code, path)}
    enabled = [finding for finding in one.findings if finding.code in asked]
    found = [finding for finding in enabled if not finding.ignored]
    if UnusedIgnore.CODE in asked:
        found += unused_ignores(one, settings, enabled, known)
    return found
