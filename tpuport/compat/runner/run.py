"""`tpuport run`: a script run as `python` runs it, inside `tpuport.porting`."""

import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tpuport.compat.emulated import child_processes, costs, replicas
from tpuport.compat.emulated.settings import PortingSettings
from tpuport.compat.imports.import_hook import RewrittenLoader, loader_for
from tpuport.compat.packages._package import find_packages
from tpuport.compat.porting import porting
from tpuport.compat.runner.exit import finish
from tpuport.diagnosis.explain import add_explanation
from tpuport.foundation.errors import UsageError
from tpuport.foundation.imports import importing
from tpuport.foundation.reporting.markup import visible
from tpuport.foundation.tracebacks import DEBUG, trim

_INTERRUPTED = 130


@dataclass(frozen=True)
class RunTarget:
    """The script or module to run.

    Attributes:
        name: The path of a script, of a folder or archive with a `__main__.py`; or a module's name.
        is_module: Whether it is a module's name, as `python -m` takes it.
        arguments: The values of `sys.argv[1:]`.
    """

    name: str
    is_module: bool = False
    arguments: Sequence[str] = field(default=())

    @property
    def folder(self) -> str:
        """Return the folder that Python puts at the start of `sys.path`."""
        if self.is_module:
            return os.getcwd()
        path = os.path.realpath(self.name)
        return path if self.is_container else os.path.dirname(path)

    @property
    def is_container(self) -> bool:
        """Return whether it is a folder or an archive with a `__main__.py`."""
        is_file = self.is_module or self.name.endswith(".py")
        return not is_file and PathFinder.find_spec("__main__", [self.name]) is not None


def run(
    program: RunTarget,
    *,
    packages: Sequence[str] = (),
    paths: Sequence[str | Path] = (),
    rewrite: bool = True,
    profile: Path | None = None,
    cache_dir: str | None = None,
    report: Path | None = None,
    full_traceback: bool = False,
    quiet: bool = False,
    ends_process: bool = True,
    **porting_options: Any,
) -> int:
    """Run a program to its end, as `__main__`.

    It finds what `torchrun` gives a single process: `sys.argv`, `sys.path` and the environment.
    What it prints, raises and exits with is what it would be with `python`, but for the frames of
    tpuport, which tracebacks leave out.

    Args:
        program: The script or module to run.
        packages: Packages to rewrite as they are imported.
        paths: Files and folders to rewrite, besides the program and what is below its folder.
        rewrite: Whether to rewrite anything.
        profile: Folder for a profiler trace of the run, for xprof or TensorBoard.
        cache_dir: Folder of compiled programs, see `tpuport.compile_cache`. If left out jax's own
            settings apply, and without a folder there equal programs are compiled once.
        report: File for the report, .html, .json or .txt; written even if the program fails.
        full_traceback: Whether tracebacks show the frames of tpuport too.
        quiet: Whether to leave out the lines at the end that say what cost time.
        ends_process: Whether the process is to end with the program: threads that are stuck then
            do not keep it alive. See `tpuport.compat.runner.exit`.
        porting_options: Passed on to `tpuport.porting`.

    Returns:
        The exit status.

    Raises:
        UsageError: there is no such program, or an option is wrong.
    """
    replicas.join()
    if replicas.rank() > 0:
        report, profile, quiet = None, None, True
    _check(program, report)
    if rewrite:
        paths = (program.folder, *paths)
    elif packages or paths:
        raise UsageError("What is not to be rewritten needs no packages and paths to rewrite.")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment(full_traceback))
        stack.enter_context(_interpreter(program))
        if cache_dir is not None:
            from tpuport.aot.cache.compile_cache import compile_cache

            stack.enter_context(compile_cache(cache_dir))
        with importing():
            from tpuport.aot.cache.program_memory import equal_programs_once

            stack.enter_context(equal_programs_once())
            settings = stack.enter_context(porting(*packages, paths=paths, **porting_options))
        with _profiled(profile):
            status = _execute(program)
            if status == 0:
                status = _join_children()
        if report is not None:
            settings.report.save(report)
        if status == 0 and not quiet:
            _say_costs(settings)
        if ends_process:
            finish(status, leaves=replicas.size() > 1)
        return status


def _check(program: RunTarget, report: Path | None) -> None:
    if not program.is_module:
        if not os.path.exists(program.name):
            raise UsageError(f"There is no file {program.name} to run.")
        if os.path.isdir(program.name) and not program.is_container:
            raise UsageError(f"The folder {program.name} has no __main__.py to run.")
    if report is not None and report.suffix.lower() not in (".html", ".json", ".txt"):
        raise UsageError(f"Expected a report file ending in .json, .html or .txt, got {report}.")


def _say_costs(settings: PortingSettings) -> None:
    found = costs.lines(
        settings.report.programs, settings.calls, settings.report.descended, settings.eager
    )
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.writelines(f"tpuport run: {visible(line)}\n" for line in found)


def _execute(program: RunTarget) -> int:
    """Run the program, print what it raises as Python does, and return its exit status."""
    try:
        exec(_main_code(program), vars(sys.modules["__main__"]))
        replicas.leave()
    except SystemExit as error:
        return _status(error.code)
    except _NoProgramError:
        raise
    except BaseException as error:
        return _shown(error)
    return 0


def _join_children() -> int:
    """Wait for the ported processes that the script has started; return the exit status."""
    try:
        child_processes.join_started()
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


class _NoProgramError(UsageError):
    """The error that there is nothing to run under a name."""


def _status(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    sys.stderr.write(f"{code}\n")
    return 1


def _shown(error: BaseException) -> int:
    add_explanation(error)
    if isinstance(error, Exception):
        for package in find_packages().values():
            package().explain(error)
    trim(error)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    show = sys.excepthook
    try:
        show(type(error), error, error.__traceback__)
    except Exception as other:
        sys.__excepthook__(type(other), other, other.__traceback__)
        sys.__excepthook__(type(error), error, error.__traceback__)
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


# The module `__main__`.


def _main_code(program: RunTarget) -> CodeType:
    """Return the code of the program, after setting up its module `__main__`."""
    main = sys.modules["__main__"]
    if program.is_module:
        spec = _module_spec(program.name)
        sys.argv[0] = spec.origin or program.name
        return _code_of(spec, main)
    if program.is_container:
        spec = PathFinder.find_spec("__main__", [program.folder])
        assert spec is not None
        if type(spec.loader) is SourceFileLoader:
            spec.loader = loader_for("__main__", spec.loader.path)
        return _code_of(spec, main)
    file = os.path.abspath(program.name)
    loader = loader_for("__main__", file)
    vars(main).update(__file__=file, __loader__=loader, __spec__=None, __cached__=None)
    if isinstance(loader, RewrittenLoader):
        return loader.get_code("__main__")
    # Not `get_code`: Python keeps no bytecode of scripts.
    return loader.source_to_code(loader.get_data(file), file)


def _code_of(spec: ModuleSpec, main: ModuleType) -> CodeType:
    loader: Any = spec.loader
    values = {"__loader__": loader, "__spec__": spec, "__package__": spec.parent}
    vars(main).update(values, __file__=spec.origin, __cached__=spec.cached)
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None:
        raise _NoProgramError(f"The module {spec.name} has no Python code to run.")
    return code


def _module_spec(name: str) -> ModuleSpec:
    """Return the spec that `python -m` runs for a name, importing the packages around it.

    Raises:
        UsageError: there is none.
    """
    parent = name.rpartition(".")[0]
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A package around it is missing; a failing import inside such a package is its own error.
        if error.name is None or not f"{parent}.".startswith(f"{error.name}."):
            raise
        spec = None
    except ValueError:
        spec = None
    if spec is None:
        raise _NoProgramError(f"There is no module {name} to run.")
    if spec.submodule_search_locations is None:
        return spec
    if name.endswith(".__main__") or importlib.util.find_spec(f"{name}.__main__") is None:
        raise _NoProgramError(f"The package {name} has no __main__ to run.")
    return _module_spec(f"{name}.__main__")


# The surroundings of the program.


@contextlib.contextmanager
def _interpreter(program: RunTarget) -> Iterator[None]:
    """Set up `sys` in the block as Python does for a program."""
    kept = sys.argv, list(sys.path), sys.modules["__main__"], sys.excepthook
    sys.argv = ["-m" if program.is_module else program.name, *program.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = program.folder
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = sys.modules["builtins"]
    # The command line has installed an excepthook of its own.
    sys.excepthook = sys.__excepthook__
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"], sys.excepthook = kept


@contextlib.contextmanager
def _environment(full_traceback: bool) -> Iterator[None]:
    """Set in the block the variables that `torchrun` sets for a process of a run: the only one, or
    a replica.

    See https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables. The name of an
    elastic run is unset: torch would look for a store of that name, which nobody serves.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank, size = str(replicas.rank()), str(replicas.size())
    values = {
        **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **({DEBUG: "1"} if full_traceback else {}),
    }
    names = (*values, "TORCHELASTIC_RUN_ID")
    kept = {name: os.environ.get(name) for name in names}
    os.environ.update(values)
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _profiled(folder: Path | None) -> Iterator[None]:
    """Record a profiler trace of the block, even if it raises."""
    if folder is None:
        yield
        return
    import jax

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"Traces cannot be written to {folder}: {reason}.") from None
    options = jax.profiler.ProfileOptions()
    # Every call of a Python function would be an event: a million in the seconds of an import.
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(folder), profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()
