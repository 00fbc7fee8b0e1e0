"""`python -m benchmarks.annotated`: accuracy of the linter on lines that people judged by hand.

`sites/*.jsonl` hold the judgements, made by reading the code and running it under plain torchax,
before the linter was run on it. The code itself is not in this repository: pass the checkouts.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from benchmarks import porter
from tpuport.rules._apply import find
from tpuport.source.inference.cross_file import find_reached, summarise
from tpuport.source.inference.inference import StaticKinds
from tpuport.source.rewrite.finding import Finding, Severity
from tpuport.source.syntax.module import Module

SITES = Path(__file__).parent / "sites"
PAGE = Path(__file__).parent.parent / "docs" / "lint_accuracy.md"
BREAKS, HAZARD, LOOK_ALIKE, OTHER = "breaks", "hazard", "look-alike", "not judged"

# The folders with the files of each repository, and the commit that was judged.
REPOSITORIES = {
    "recogdrive": (("navsim", "internvl_chat/internvl"), "zorrofox/recogdrive 6b4663b"),
    "hunyuan": (("hyvideo",), "Tencent-Hunyuan/HunyuanVideo-1.5 60783e7"),
    "openpi": (("src", "scripts"), "Physical-Intelligence/openpi 15a9616"),
}


class Site(TypedDict):
    """A line that someone has judged.

    Attributes:
        file: Path from the root of the repository.
        line: Line number.
        label: `breaks`: raises when the step is traced without CUDA. `hazard`: wrong, slow, or
            breaks in an unusual configuration. `look-alike`: fine.
        pattern: Kind of line.
        reason: Reason of the judgement.
    """

    file: str
    line: int
    label: str
    pattern: str
    reason: str


@dataclass(frozen=True)
class Score:
    """The agreement of findings and judgements.

    Attributes:
        errors: Number of lines with an error, by judgement.
        others: Number of lines with another finding (a silent fault or a slow-down), by judgement.
        sites: Number of sites by label.
        missed: The breaking sites that have no error.
    """

    errors: Counter[str]
    others: Counter[str]
    sites: Counter[str]
    missed: tuple[Site, ...]

    @property
    def precision(self) -> float:
        """Return the share of errors that are on breaking sites."""
        return self.errors[BREAKS] / max(self.errors.total(), 1)

    @property
    def recall(self) -> float:
        """Return the share of breaking sites that have an error."""
        return 1 - len(self.missed) / max(self.sites[BREAKS], 1)

    @property
    def false_alarms(self) -> float:
        """Return the share of look-alikes that have any finding."""
        flagged = self.errors[LOOK_ALIKE] + self.others[LOOK_ALIKE]
        return flagged / max(self.sites[LOOK_ALIKE], 1)


def read_sites(name: str) -> list[Site]:
    """Return the judged sites of a repository."""
    lines = (SITES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def score(sites: Iterable[Site], findings: Iterable[Finding]) -> Score:
    """Compare findings with judgements, line by line, without notes, which are not shown."""
    labels = {(site["file"], site["line"]): site["label"] for site in sites}
    files = {site["file"] for site in sites}
    shown = [f for f in findings if f.severity is not Severity.NOTE and f.file in files]
    errors = {(f.file, f.line) for f in shown if f.severity is Severity.ERROR}
    others = {(f.file, f.line) for f in shown} - errors
    return Score(
        errors=Counter(labels.get(place, OTHER) for place in errors),
        others=Counter(labels.get(place, OTHER) for place in others),
        sites=Counter(labels.values()),
        missed=tuple(
            site
            for site in sites
            if site["label"] == BREAKS and (site["file"], site["line"]) not in errors
        ),
    )


def lint(root: Path, folders: Iterable[str], files: Iterable[str]) -> list[Finding]:
    """Return the findings in some files of a repository.

    Its other files are read, too, to find what a step reaches.
    """
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    texts = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}
    reached = find_reached(
        {file: summarise(Module(text, file=file)) for file, text in texts.items()}
    )
    return [
        finding
        for file in files
        if file in texts
        for finding in find(texts[file], file=file, kinds=StaticKinds(reached[file]))
    ]


def page(scores: Mapping[str, Score], touched: Mapping[str, Iterable[Finding]]) -> str:
    """Return the page that shows the scores.

    Args:
        scores: The scores by the repository and commit that was judged.
        touched: The findings by the name of a porter's list.
    """
    rows = [
        f"| {commit} | {found.sites.total()} | {found.sites[BREAKS]} | {found.precision:.3f} |"
        f" {found.recall:.3f} | {found.false_alarms:.2%} |"
        for commit, found in scores.items()
    ]
    missed = [
        f"- `{site['file']}:{site['line']}`: {site['reason']}"
        for found in scores.values()
        for site in found.missed
    ]
    return (
        HEAD
        + "\n".join(rows)
        + MISSED
        + "\n".join(missed or ["- none"])
        + "\n"
        + porter.section(touched)
    )


HEAD = """\
# How often linting is right

Written by `python -m benchmarks.annotated`; do not edit.

Lines of three code bases were judged by hand, by reading them and by running what they do under
plain torchax, before the linter saw them: *breaks* (the trace stops there without CUDA), *hazard*
(silently wrong, slow, or only in an unusual configuration) and *look-alike* (fine). The rules were
then worked on with these lines at hand, so expect a little less on code that nobody has judged
yet. An error on a line judged a hazard counts against the precision. The judgements are in
`benchmarks/sites`.

| code | lines | breaking | precision of errors | recall of breaking lines | false alarms |
| --- | --- | --- | --- | --- | --- |
"""
MISSED = """

Breaking lines without an error:

"""


def main() -> None:
    """Write the page, and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.annotated", description=__doc__)
    for name, (_, commit) in REPOSITORIES.items():
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=f"checkout of {commit}")
    for name, (_, read) in porter.LISTS.items():
        if name not in REPOSITORIES:
            parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=f"a copy of {read}")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    options = vars(parser.parse_args())
    scores: dict[str, Score] = {}
    for name, (folders, commit) in REPOSITORIES.items():
        if options[name] is not None:
            sites = read_sites(name)
            files = sorted({site["file"] for site in sites})
            scores[commit] = score(sites, lint(options[name], folders, files))
    touched = {
        name: lint(options[name], folders, {site["file"] for site in porter.read_list(name)})
        for name, (folders, _) in porter.LISTS.items()
        if options[name] is not None
    }
    text = page(scores, touched)
    print(text)
    for commit, found in scores.items():
        print(f"{commit}: errors {dict(found.errors)}, others {dict(found.others)}")
    if len(scores) == len(REPOSITORIES) and len(touched) == len(porter.LISTS):
        options["out"].write_text(text, encoding="utf-8")
        print(f"wrote {options['out']}")


if __name__ == "__main__":
    main()
