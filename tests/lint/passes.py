"""Passes that other processes can be told of: what a run does, made visible."""

import itertools
import os
import time
from collections.abc import Mapping
from typing import Any

from tpuport.lint.records import Checked, Problem


def record(word: str, name: str) -> None:
    """Note in the folder that the environment names that work was done."""
    with open(os.path.join(os.environ["TPUPORT_TEST_LOG"], "log"), "a") as file:
        file.write(f"{word} {name} {os.getpid()}\n")


def answer(checked: Checked, summary: Any = None) -> dict[str, Any]:
    """What a check gives."""
    return {"checked": checked.to_json(), "summary": summary}


def check(data: bytes, name: str, options: Any) -> Any:
    """Says as a problem what it was given; the summary is the first line."""
    record("check", f"{name} {options.get('facts', '-')}")
    summary = data.decode().partition("\n")[0]
    return answer(Checked("", problems=(Problem("", str(options)),)), summary)


def connect(summaries: Mapping[str, str]) -> dict[str, str]:
    """Facts: the first line of the file of the next name, if there is one."""
    names = sorted(summaries)
    return {name: summaries[other] for name, other in itertools.pairwise(names)}


def raise_error(data: bytes, name: str, options: Any) -> Any:
    """A bug in the work on one file."""
    del options
    if name == "bad.py":
        raise KeyError("a\nb")
    return answer(Checked("", functions=len(data)))


def end_process(data: bytes, name: str, options: Any) -> Any:
    """Work that takes its process with it, as a stack overflow does."""
    if name == "bad.py":
        os._exit(3)
    return raise_error(data, name, options)


def slow(data: bytes, name: str, options: Any) -> Any:
    """Work that ends in another order than it begins."""
    del options
    time.sleep(0.01 if name < "b" else 0)
    return answer(Checked("", functions=len(data)))
