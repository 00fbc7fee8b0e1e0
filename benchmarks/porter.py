"""The linter against lists of what somebody who ports code must touch, host code included.

`sites/*_porter.jsonl` were written as a porter would: every file read, and each line written down
that breaks or has to change on a TPU machine without CUDA, or that only looks so, before the linter
was run on the code. `first_sight` is the severity of what the linter of that day then said.
`sites/unseen.jsonl` are findings drawn at random from other repositories and judged, and lines that
a search for words such as `cuda` and `.item()` turned up beside them.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from tpuport.source.rewrite.finding import Finding, Severity

SITES = Path(__file__).parent / "sites"
BREAKS, LOOK_ALIKE = "breaks", "look-alike"
ORDER = (Severity.ERROR, Severity.SILENT, Severity.SLOW, Severity.DEVICE)
# The folders that are linted, what was read, and the list of it.
LISTS = {
    "recogdrive": (("navsim", "internvl_chat"), "zorrofox/recogdrive 6b4663b"),
    "hunyuan_fork": (("hyvideo",), "HunyuanVideo-1.5, the package hyvideo-fork 20260412"),
}
# For each sample of unseen code: the repositories, and how many findings there were to draw from.
SAMPLES = {
    1: ("REPA 67f7145, VAR 78b9539, diffusion_policy 5ba07ac, Wan2.1 9737cba, flux 802fb47", 159),
    2: ("act 742c753, guided-diffusion 22e0df8, dinov2 b8931f7, detr 29901c5", 226),
}


class PorterSite(TypedDict):
    """A judged line.

    Attributes:
        file: Path from the root of the repository.
        line: Line number.
        label: `breaks`, `hazard` or `look-alike`.
        pattern: Kind of line.
        reason: Reason of the judgement.
        first_sight: Severity of the finding there when the list was new, or None.
    """

    file: str
    line: int
    label: str
    pattern: str
    reason: str
    first_sight: str | None


class Drawn(TypedDict):
    """A finding in unseen code that was judged, or a line without one.

    Attributes:
        sample: The number of the sample.
        repository: Where it was.
        file: Path from the root of the repository.
        line: Line number.
        code: The rule that found it, or None.
        severity: The finding's severity, or None.
        label: `breaks`, or `look-alike` for a false alarm.
        reason: Reason of the judgement, where it is not plain.
    """

    sample: int
    repository: str
    file: str
    line: int
    code: str | None
    severity: str | None
    label: str
    reason: NotRequired[str]


@dataclass(frozen=True)
class Tally:
    """The judged lines of one list by what the linter says of them.

    Attributes:
        breaking: Number of breaking lines by the severity of what is found there, or None.
        false: The look-alikes that have a finding.
        look_alikes: Number of all look-alikes.
    """

    breaking: Counter[str | None]
    false: tuple[PorterSite, ...]
    look_alikes: int

    @property
    def recall(self) -> float:
        """Return the share of breaking lines that have a finding."""
        return 1 - self.breaking[None] / max(self.breaking.total(), 1)

    def row(self, title: str) -> str:
        """Return the tally as a row of a table."""
        loud = sum(self.breaking[s.value] for s in ORDER[:-1])
        flagged = f"{len(self.false)} of {self.look_alikes}"
        return (
            f"| {title} | {self.breaking.total()} | {loud} | {self.breaking['device']} |"
            f" {self.breaking[None]} | {self.recall:.3f} | {flagged} |"
        )


def read_list(name: str) -> list[PorterSite]:
    """Return the judged lines of a repository."""
    file = SITES / f"{name.removesuffix('_fork')}_porter.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_drawn() -> list[Drawn]:
    """Return what was drawn from unseen code."""
    text = (SITES / "unseen.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def said(findings: Iterable[Finding]) -> Callable[[PorterSite], str | None]:
    """Return a function from a site to the gravest severity of what is found on its line."""
    at: dict[tuple[str, int], Severity] = {}
    for finding in findings:
        place = (finding.file, finding.line)
        if finding.severity in ORDER and (
            place not in at or ORDER.index(finding.severity) < ORDER.index(at[place])
        ):
            at[place] = finding.severity
    return lambda site: at[place].value if (place := (site["file"], site["line"])) in at else None


def tally(sites: Iterable[PorterSite], severity: Callable[[PorterSite], str | None]) -> Tally:
    """Count what the linter says about the Python files of a list."""
    python = [site for site in sites if site["file"].endswith(".py")]
    alike = [site for site in python if site["label"] == LOOK_ALIKE]
    return Tally(
        breaking=Counter(severity(site) for site in python if site["label"] == BREAKS),
        false=tuple(site for site in alike if severity(site) is not None),
        look_alikes=len(alike),
    )


def section(found: Mapping[str, Iterable[Finding]]) -> str:
    """Return the part of the page about these lists.

    Args:
        found: The linter's findings by the name of a list.
    """
    rows: list[str] = []
    missed: list[str] = []
    settings = 0
    for name, findings in found.items():
        sites, now = read_list(name), said(findings)
        settings += sum(s["label"] == BREAKS and not s["file"].endswith(".py") for s in sites)
        title = LISTS[name][1]
        rows.append(tally(sites, lambda site: site["first_sight"]).row(f"{title}, first sight"))
        rows.append(tally(sites, now).row(f"{title}, now"))
        missed += [
            f"- `{site['file']}:{site['line']}`: {site['reason']}"
            for site in sites
            if site["label"] == BREAKS and site["file"].endswith(".py") and now(site) is None
        ]
    drawn = read_drawn()
    unseen = [
        _unseen_row(number, [one for one in drawn if one["sample"] == number]) for number in SAMPLES
    ]
    return "".join(
        [
            HEAD,
            "\n".join(rows),
            SETTINGS.format(settings=settings),
            UNSEEN,
            "\n".join(unseen),
            FALSE,
            "\n".join(_false_alarms(drawn)),
            OTHERWISE,
            "\n".join(missed),
            "\n",
        ]
    )


def _unseen_row(number: int, drawn: list[Drawn]) -> str:
    names, total = SAMPLES[number]
    judged = [one for one in drawn if one["code"] is not None]
    right = sum(one["label"] == BREAKS for one in judged)
    missed = len(drawn) - len(judged)
    true = total * right / len(judged)
    return (
        f"| {names} | {total} | {right} of {len(judged)} | {right / len(judged):.3f} |"
        f" {missed} | {true / (true + missed):.3f} |"
    )


def _false_alarms(drawn: Iterable[Drawn]) -> list[str]:
    return [
        f"- `{one['repository']}/{one['file']}:{one['line']}` ({one['code']}): {one.get('reason')}"
        for one in drawn
        if one["label"] == LOOK_ALIKE
    ]


HEAD = """
## What a porter must touch

Two more lists were made in November 2026, as somebody porting the code would: all files, with
scripts and settings, and every line that breaks *or has to change* without CUDA. Here a line counts
as found whatever the severity is, `device` included, and *first sight* is what the linter of that
day said before anybody worked on it. The lists are stricter than the ones above: code that only
runs with flash attention, a growing cache, and a default that picks the CPU in silence are breaking
lines here and not there.

| list | breaking | error, silent or slow | device | missed | recall | look-alikes flagged |
| --- | --- | --- | --- | --- | --- | --- |
"""
SETTINGS = """

The linter reads Python. {settings} more lines that a porter must touch are in YAML, requirements
and shell files (`accelerator: gpu`, `torchrun`, `bitsandbytes`), and none of them is found.
"""
UNSEEN = """
## Unseen code

Findings of every severity but notes, in repositories that nobody looked at before: 60 drawn at
random were judged by hand, and so were all lines without a finding that a search for CUDA, its
packages, `.item()` and the like turned up. So recall is an estimate, and only of lines with such
words. The second sample was drawn after the first was worked on.

| code | findings | right | precision | missed | recall |
| --- | --- | --- | --- | --- | --- |
"""
FALSE = """

False alarms among those, when they were drawn:

"""
OTHERWISE = """

## Judged otherwise

Breaking lines of the porter's lists that are not found, on purpose or not:

- What follows from a line that is found is not found again: slices by a number that `.item()` gave,
  `log_prob` of a distribution whose constructor is found.
- A function that only imports, and whose handler raises, is called where a setting asks for the
  package.
- `nonzero` and `.item()` of a scheduler that a pipeline calls on the host are host code. Where a
  loop over its steps is traced, the trace says so.
- A write `x[mask] = rows` has a static shape, and so has `torch.full` with a traced number: who
  made the list above ran both lines, so these two judgements are wrong.
- `torch.nonzero` in a function that only GPUs run is a note, as it is everywhere.

"""
