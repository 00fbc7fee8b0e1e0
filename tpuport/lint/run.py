"""Work on many files: in parallel, from the cache where possible, with results in order.

A run has two passes. The first checks and summarises each file by itself. The summaries of all
files give facts about some of them, such as which functions are reached by steps elsewhere. The
second pass checks those files again with their facts. Answers are cached by the content of the
file, those of the second pass also by the facts: after a change in one file, another file is
checked again only if its facts changed.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

from tpuport.lint.cache import Cache
from tpuport.lint.check import check, connect, tail
from tpuport.lint.files import shown_path
from tpuport.lint.records import Checked, Problem, Trouble
from tpuport.source.inference.gpu_only import CUDA_PACKAGES

# Bytes of source below which starting another process costs more than it saves.
MIN_PARALLEL_BYTES = 400_000
_MIN_BATCH_BYTES = 100_000
_MAX_BATCH = 50

Json = Any
# Takes the bytes and name of a file and an argument, and returns an answer that depends on nothing
# else. It must be at the top level of a module, so that other processes can import it.
Task = Callable[[bytes, str, Json], Json]
# Called with the number of files done and the number of all files.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Passes:
    """The two passes of a run.

    Attributes:
        check: Checks one file, as `tpuport.lint.check.check` does.
        connect: Takes the summary of each file by path, and returns the facts by path that cannot
            be seen in the file itself.
    """

    check: Task = check
    connect: Callable[[Mapping[str, Json]], Mapping[str, Json]] = connect


def run(
    files: Sequence[Path],
    *,
    strict: bool = False,
    jobs: int | None = None,
    cache: Cache | None = None,
    progress: Progress | None = None,
    passes: Passes | None = None,
) -> list[Checked]:
    """Check files in two passes, and return the results in the order of the files.

    Args:
        files: Python files and notebooks.
        strict: Whether values of unknown kind count as traced inside a step.
        jobs: Number of processes that may work at once; the number of processors if left out.
        cache: The cache of answers.
        progress: Callback for the number of files done.
        passes: The work on each file; `Passes()` if left out.
    """
    passes = passes or Passes()
    names = [shown_path(path) for path in files]
    with Workers(jobs=jobs or processors(), cache=cache or Cache(None)) as workers:
        options = {"strict": strict, **_own_packages(files)}
        inputs = [(path, options) for path in files]
        answers = workers.map(passes.check, inputs, progress)
        facts = passes.connect(_summaries(names, answers))
        again = [place for place, name in enumerate(names) if name in facts]
        inputs = [(files[place], {**options, "facts": facts[names[place]]}) for place in again]
        for place, answer in zip(again, workers.map(passes.check, inputs), strict=True):
            answers[place] = answer
    return [_checked(answer, name) for answer, name in zip(answers, names, strict=True)]


def _own_packages(files: Sequence[Path]) -> dict[str, list[str]]:
    """Return the packages for CUDA that are among the files, for `check`, if there are any."""
    folders = {folder for path in files if path.name == "__init__.py" for folder in path.parts[:-1]}
    own = sorted(CUDA_PACKAGES & folders)
    return {"own": own} if own else {}


def _summaries(names: Sequence[str], answers: "Sequence[Json | FileFailure]") -> dict[str, Json]:
    return {
        name: answer["summary"]
        for name, answer in zip(names, answers, strict=True)
        if not isinstance(answer, FileFailure) and answer["summary"] is not None
    }


def run_source(data: bytes, name: str, *, strict: bool = False, fixes: bool = True) -> Checked:
    """Check source that does not come from a file; say which findings have a fix if `fixes`."""
    return _checked(attempt(check, data, name, {"strict": strict, "fixes": fixes}), name)


def processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _checked(answer: "Json | FileFailure", name: str) -> Checked:
    if isinstance(answer, FileFailure):
        return Checked(name, problems=(Problem(name, answer.reason, answer.trouble),))
    return Checked.from_json(answer["checked"], name)


@dataclass(frozen=True)
class FileFailure:
    """Work on a file that ended in an exception or killed its process."""

    reason: str
    trouble: Trouble


@dataclass(frozen=True)
class _Item:
    """Work on one file that no cache could answer."""

    place: int
    path: Path
    argument: Json
    size: int
    key: str


class Workers:
    """Workers on files, with processes that are started only when there is enough work."""

    def __init__(self, *, jobs: int, cache: Cache) -> None:
        self._jobs, self._cache = jobs, cache
        self._pool: ProcessPoolExecutor | None = None
        self._digests: dict[Path, tuple[str, int]] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace
        self._close()

    def map(
        self,
        task: Task,
        inputs: Sequence[tuple[Path, Json]],
        progress: Progress | None = None,
    ) -> "list[Json | FileFailure]":
        """Return the answer for each file with its argument, in their order."""
        results: dict[int, Json | FileFailure] = {}
        missing: list[_Item] = []
        for place, (path, argument) in enumerate(inputs):
            found = self._look_up(task, place, path, argument)
            if isinstance(found, _Item):
                missing.append(found)
            else:
                results[place] = found
        for item, answer in self._work(task, missing):
            results[item.place] = answer
            if not isinstance(answer, FileFailure):
                self._cache.put(item.key, answer)
            if progress is not None:
                progress(len(results), len(inputs))
        return [results[place] for place in range(len(inputs))]

    def _look_up(
        self, task: Task, place: int, path: Path, argument: Json
    ) -> "Json | _Item | FileFailure":
        try:
            if path not in self._digests:
                data = path.read_bytes()
                self._digests[path] = hashlib.sha256(data).hexdigest(), len(data)
        except OSError as error:
            return _unreadable(error)
        digest, size = self._digests[path]
        question = json.dumps(argument, sort_keys=True)
        name = f"{task.__module__}.{task.__qualname__}"
        key = self._cache.key(name, tail(path), digest, question)
        kept = self._cache.get(key)
        return _Item(place, path, argument, size, key) if kept is None else kept

    def _work(self, task: Task, items: list[_Item]) -> "Iterator[tuple[_Item, Json | FileFailure]]":
        total = sum(item.size for item in items)
        if self._jobs < 2 or len(items) < 2 or total < MIN_PARALLEL_BYTES:
            for item in items:
                yield item, _attempt(task, item.path, item.argument)
            return
        unanswered = {item.place: item for item in items}
        try:
            futures = self._submit(task, items)
            for future in as_completed(futures):
                for item, answer in zip(futures[future], future.result(), strict=True):
                    del unanswered[item.place]
                    yield item, answer
        except BrokenProcessPool:
            self._close()
            for item in unanswered.values():
                yield item, _attempt_apart(task, item)

    def _submit(
        self, task: Task, items: list[_Item]
    ) -> "dict[Future[list[Json | FileFailure]], list[_Item]]":
        if self._pool is None:
            # Spawn, not fork: forking a process with threads can deadlock.
            context = get_context("spawn")
            self._pool = ProcessPoolExecutor(min(self._jobs, len(items)), mp_context=context)
        return {
            self._pool.submit(_attempt_all, task, [(i.path, i.argument) for i in batch]): batch
            for batch in _batches(items)
        }

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _batches(items: list[_Item]) -> Iterator[list[_Item]]:
    """Yield items in batches worth sending, large ones first so that none holds up the end."""
    batch: list[_Item] = []
    for item in sorted(items, key=lambda item: (-item.size, item.place)):
        batch.append(item)
        if sum(i.size for i in batch) >= _MIN_BATCH_BYTES or len(batch) == _MAX_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _attempt_all(task: Task, inputs: list[tuple[Path, Json]]) -> "list[Json | FileFailure]":
    return [_attempt(task, path, argument) for path, argument in inputs]


def _attempt_apart(task: Task, item: _Item) -> "Json | FileFailure":
    """Work on one file in a process of its own, after some file has killed the shared ones."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with suppress(BrokenProcessPool):
            return pool.submit(_attempt, task, item.path, item.argument).result()
    reason = "ended the process that worked on it. What to do: report this as a bug of tpuport"
    return FileFailure(reason, Trouble.INTERNAL)


def _attempt(task: Task, path: Path, argument: Json) -> "Json | FileFailure":
    try:
        data = path.read_bytes()
    except OSError as error:
        return _unreadable(error)
    return attempt(task, data, tail(path), argument)


def attempt(task: Task, data: bytes, name: str, argument: Json) -> "Json | FileFailure":
    """Return the answer for a file's bytes, or a failure with the error in it."""
    try:
        return task(data, name, argument)
    except Exception as error:
        # A bug on one file must not stop the run: it goes into the report.
        return FileFailure(
            f"{_bug(error)}. What to do: report this as a bug of tpuport", Trouble.INTERNAL
        )


def _bug(error: Exception) -> str:
    at, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        at = f" at {Path(code.co_filename).name}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return f"internal error, {type(error).__name__}{at}: {' '.join(str(error).split())[:200]}"


def _unreadable(error: OSError) -> FileFailure:
    return FileFailure(f"cannot be read: {error.strerror or error}", Trouble.UNREAD)
