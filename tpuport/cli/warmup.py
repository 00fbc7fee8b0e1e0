"""`tpuport warmup`: fill the compile cache ahead of time."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuport.cli import _options as options
from tpuport.cli._common import WRONG_CALL, errors_as_exit_codes, say
from tpuport.foundation.imports import importing

if TYPE_CHECKING:
    from tpuport.aot.cache.warmup import Warmed

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A function without arguments, as package.module:function or file.py:function.",
    ),
]
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help="Where to keep programs [default: JAX_COMPILATION_CACHE_DIR or the user's cache].",
    ),
]
MaxSize = Annotated[
    float, typer.Option("--max-size", metavar="GIB", help="GiB to keep at most; 0 for no limit.")
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="How many to compile at a time [default: cores]."),
]


def warmup(
    target: Target,
    cache_dir: CacheDir = None,
    max_size: MaxSize = 10.0,
    jobs: Jobs = None,
    as_json: options.AsJson = False,
) -> None:
    """Fill the compile cache ahead of time, so that other processes load their programs.

    TARGET returns what to compile: (ported model, args) or (ported model, args,
    kwargs) for each program, where shapes may replace tensors. Or it returns
    nothing and makes the calls itself. Damaged entries are removed first.
    """
    with errors_as_exit_codes("tpuport warmup"):
        with importing():
            from tpuport.aot.cache.cache_folder import remove_damaged
            from tpuport.aot.cache.compile_cache import GIB, compile_cache
            from tpuport.aot.cache.warmup import warmup as warm_up
            from tpuport.compat.runner.target import load_target
            from tpuport.diagnosis.explain import explaining

        function = load_target(target)
        limit = int(max_size * GIB) or None
        with compile_cache(cache_dir, max_size=limit) as cache, explaining():
            folder = Path(cache.directory)
            removed = remove_damaged(folder) if folder.is_dir() else 0
            if removed:
                say(f"removed {removed} damaged {'entry' if removed == 1 else 'entries'}")
            wanted = function()
            warmed = [] if wanted is None else warm_up(wanted, workers=jobs)
        if as_json:
            found = {"directory": cache.directory, "programs": [asdict(one) for one in warmed]}
            typer.echo(json.dumps(found, indent=1))
        else:
            _print_programs(warmed)
            typer.echo(str(cache.report) if wanted is None else _summary(warmed, cache.directory))
        if not cache.report.programs:
            say(f"{target} compiled nothing")
            raise typer.Exit(WRONG_CALL)


def _print_programs(warmed: "list[Warmed]") -> None:
    for one in warmed:
        word = "loaded" if one.hit else "compiled"
        typer.echo(f"{word:8} {one.seconds:7.2f} s  {one.name}")


def _summary(warmed: "list[Warmed]", directory: str) -> str:
    from tpuport.aot.cache.cache_folder import entries

    kept = entries(Path(directory)) if "://" not in directory else []
    hits = sum(one.hit for one in warmed)
    size = sum(entry.size for entry in kept) / 2**20
    return (
        f"{len(warmed)} programs: {hits} loaded, {len(warmed) - hits} compiled; {directory} holds"
        f" {len(kept)} entries, {size:.1f} MiB"
    )
