"""Passes that other processes can be told of: what a run does, made visible."""

import os
import time
from typing import Any

from tpuport.lint.records import Checked, Problem


def record(word: str, name: str) -> None:
    """Note in the folder that the environment names that work was done."""
    with open(os.path.join(os.environ["TPUPORT_TEST_LOG"], "log"), "a") as file:
        file.write(f"{word} {name} {os.getpid()}\n")


def summarise(data: bytes, name: str, options: Any) -> Any:
    """What other files need: the names that a file defines."""
    del options
    record("summarise", name)
    return [line[4:].partition("(")[0] for line in data.decode().split("\n") if line[:4] == "def "]


def connect(summaries: Any) -> Any:
    """Facts for each file: how many names there are that files before it define."""
    record("connect", str(len(summaries)))
    return {
        name: {"before": sum(len(summaries[other]) for other in summaries if other < name)}
        for name in summaries
    }


def check(data: bytes, name: str, options: Any) -> Any:
    """Says as a problem what it was given."""
    del data
    record("check", name)
    return Checked("", problems=(Problem("", str(options)),)).to_json()


def raise_error(data: bytes, name: str, options: Any) -> Any:
    """A bug in the work on one file."""
    del options
    if name == "bad.py":
        raise KeyError("a\nb")
    return Checked("", functions=len(data)).to_json()


def end_process(data: bytes, name: str, options: Any) -> Any:
    """Work that takes its process with it, as a stack overflow does."""
    if name == "bad.py":
        os._exit(3)
    return raise_error(data, name, options)


def slow(data: bytes, name: str, options: Any) -> Any:
    """Work that ends in another order than it begins."""
    del options
    time.sleep(0.01 if name < "b" else 0)
    return Checked("", functions=len(data)).to_json()
