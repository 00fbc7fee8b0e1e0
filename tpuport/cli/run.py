"""`tpuport run`: runs an unmodified PyTorch script on the JAX device."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tpuport.cli._common import errors_as_exit_codes
from tpuport.foundation.imports import importing

_REWRITTEN, _PORTED, _RUN = "What is rewritten", "What is ported", "Run"

Script = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT",
        show_default=False,
        help="A Python file, or a folder or archive with a `__main__.py`; with `-m` a module.",
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", show_default=False, help="Arguments and options of the script."),
]
Module = Annotated[
    bool, typer.Option("-m", "--module", help="Run a module by its name, as `python -m` does.")
]
Packages = Annotated[
    list[str] | None,
    typer.Option(
        "--package",
        metavar="NAME",
        rich_help_panel=_REWRITTEN,
        help="Rewrite this package too, wherever it is installed. May be repeated.",
    ),
]
Paths = Annotated[
    list[Path] | None,
    typer.Option(
        "--path",
        metavar="DIR",
        rich_help_panel=_REWRITTEN,
        help="Rewrite files below this folder too, except site-packages. May be repeated.",
    ),
]
NoRewrite = Annotated[
    bool, typer.Option("--no-rewrite", rich_help_panel=_REWRITTEN, help="Rewrite nothing.")
]
Absent = Annotated[
    list[str] | None,
    typer.Option(
        "--absent",
        metavar="NAME",
        rich_help_panel=_PORTED,
        help="A package that may be missing: its import works, its use fails. May be repeated.",
    ),
]
Eager = Annotated[
    list[str] | None,
    typer.Option(
        "--eager",
        metavar="CLASS",
        rich_help_panel=_PORTED,
        help="Run modules of this class in eager PyTorch. May be repeated.",
    ),
]
Fallback = Annotated[
    str | None,
    typer.Option(
        "--fallback",
        metavar="host",
        rich_help_panel=_PORTED,
        show_default=False,
        help="host: run functions that cannot be traced on the host, inside the programs.",
    ),
]
Programs = Annotated[
    list[str] | None,
    typer.Option(
        "--program",
        metavar="CLASS.METHOD",
        rich_help_panel=_PORTED,
        help="Compile this method as one program, besides calls of modules. May be repeated.",
    ),
]
NoVerify = Annotated[
    bool,
    typer.Option(
        "--no-verify",
        rich_help_panel=_PORTED,
        help="Do not compare the first call of each program with eager PyTorch.",
    ),
]
Rtol = Annotated[
    float | None,
    typer.Option(
        "--rtol",
        min=0.0,
        metavar="R",
        rich_help_panel=_PORTED,
        show_default=False,
        help="Tolerance of that comparison, relative to the largest element.",
    ),
]
NoPort = Annotated[
    bool,
    typer.Option(
        "--no-port", rich_help_panel=_PORTED, help="Compile nothing: eager PyTorch on the CPU."
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="DIR",
        file_okay=False,
        rich_help_panel=_RUN,
        help="Write a trace of the run there, for xprof or TensorBoard.",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        dir_okay=False,
        rich_help_panel=_RUN,
        show_default=False,
        help="Write a report of what was ported, and how well it agrees: .html, .json, .txt.",
    ),
]
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        rich_help_panel=_RUN,
        show_default=False,
        help="Folder to keep compiled programs in and to load them from.",
    ),
]
FullTraceback = Annotated[
    bool,
    typer.Option(
        "--full-traceback",
        rich_help_panel=_RUN,
        help="Show tpuport's own lines in tracebacks, too: for reports of bugs.",
    ),
]
Replicas = Annotated[
    int,
    typer.Option(
        "--replicas",
        min=1,
        metavar="N",
        rich_help_panel=_RUN,
        help="Run the script in N processes on this host: replicas of torch_xla, or of a"
        " torch.distributed group.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", rich_help_panel=_RUN, help="Do not say at the end what cost time."
    ),
]


def run(
    script: Script,
    args: Arguments = None,
    module: Module = False,
    package: Packages = None,
    path: Paths = None,
    no_rewrite: NoRewrite = False,
    absent: Absent = None,
    eager: Eager = None,
    fallback: Fallback = None,
    program: Programs = None,
    no_verify: NoVerify = False,
    rtol: Rtol = None,
    no_port: NoPort = False,
    profile: Profile = None,
    cache_dir: CacheDir = None,
    report: Report = None,
    replicas: Replicas = 1,
    full_traceback: FullTraceback = False,
    quiet: Quiet = False,
) -> None:
    """Run a script that was written for CUDA, without editing it.

    Like `torchrun` with one process. The script and the files below its folder
    are rewritten in memory on import; CUDA calls are emulated; calls of modules
    on "cuda" become compiled programs, compared with eager PyTorch. Exits with
    the script's own status.
    """
    with errors_as_exit_codes("tpuport run"):
        _start_replicas(replicas)
        with importing():
            from tpuport.compat.runner.run import RunTarget
            from tpuport.compat.runner.run import run as run_program

        given = args or []
        status = run_program(
            # `verify` and `port` want a `--` in front of the script's options, which is none.
            RunTarget(script, module, given[1:] if given[:1] == ["--"] else given),
            packages=package or (),
            paths=path or (),
            rewrite=not no_rewrite,
            profile=profile,
            cache_dir=cache_dir,
            report=report,
            full_traceback=full_traceback,
            quiet=quiet,
            absent=absent or (),
            eager=eager or (),
            fallback=fallback,
            methods=program or (),
            verify=not no_verify,
            rtol=rtol,
            port_modules=not no_port,
        )
    raise typer.Exit(status)


def _start_replicas(count: int) -> None:
    """Run this command in a process for each replica, if there are several and this is none."""
    from tpuport.compat.emulated.replica_processes import (
        is_replica,
        refuse_launcher,
        run_replicas,
    )

    refuse_launcher()
    if count > 1 and not is_replica():
        raise typer.Exit(run_replicas(count, [sys.executable, *sys.orig_argv[1:]]))
