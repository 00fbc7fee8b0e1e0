"""`tpuport compile`: does a model compile for a TPU slice, does it fit, and what does it cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuport.cli._common import (
    DOES_NOT_FIT,
    FAILED,
    WRONG_CALL,
    errors_as_exit_codes,
    has_color,
    say,
)
from tpuport.cli._supervised import supervise
from tpuport.foundation.errors import UsageError
from tpuport.foundation.imports import importing

if TYPE_CHECKING:
    from tpuport.aot.report import CompileReport
    from tpuport.aot.search import SearchReport

_MINUTE = 60.0

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A function without arguments, as package.module:function or file.py:function.",
    ),
]
Topology = Annotated[
    str, typer.Option("--topology", "-t", metavar="SLICE", help="Such as v6e-8, v5p-16, v5e:4x4.")
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="AXES",
        help="Sizes by axis, as in fsdp=4,tensor=2; one may be -1 [default: fsdp=-1].",
    ),
]
Rules = Annotated[str, typer.Option(metavar="PRESET", help="How parameters are sharded.")]
Train = Annotated[bool, typer.Option("--train", help="Compile a training step.")]
Optimizer = Annotated[
    str, typer.Option(metavar="NAME", help="adamw, adam, adafactor, lion, sgd or none.")
]
Method = Annotated[str, typer.Option(metavar="NAME", help="Which method of the model.")]
Out = Annotated[
    list[Path] | None,
    typer.Option(
        "--out", "-o", metavar="FILE", help="Write the report: .html, .json or text. Repeatable."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
NoKernelTimes = Annotated[
    bool,
    typer.Option(
        "--no-kernel-times", help="Do not compile Pallas kernels once more for their schedules."
    ),
]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Half the time or less: let the compiler optimise less."),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Estimate by the rates in this file of `tpuport doctor --measure`."
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Fail where the sharding rules look unintended.")
]
Search = Annotated[
    bool,
    typer.Option(
        "--search", help="Try meshes, presets and attention strategies; rank those that fit."
    ),
]
Minutes = Annotated[
    float, typer.Option(metavar="MINUTES", help="With --search: begin no trial after that long.")
]


def compile_(
    target: Target,
    topology: Topology,
    mesh: Mesh = None,
    rules: Rules = "fsdp",
    train: Train = False,
    optimizer: Optimizer = "adamw",
    method: Method = "forward",
    out: Out = None,
    as_json: AsJson = False,
    no_kernel_times: NoKernelTimes = False,
    quick: Quick = False,
    calibration: Calibration = None,
    strict: Strict = False,
    search: Search = False,
    minutes: Minutes = 30.0,
) -> None:
    """Compile a model for a TPU slice without having one: does it fit, and what does it cost.

    TARGET returns (model, inputs): a module, built under torch.device("meta") if
    it is large, and the arguments of a call, a tuple or a dict, in which shapes
    may replace tensors. Or it returns a dict with "model", "inputs" and any other
    argument of tpuport.compile_for, such as "rules" or "train", which override
    options. The model may also be the result of tpuport.training.make_train_step.
    Exit code 3 means that it does not fit.
    """
    supervise("compile")
    with errors_as_exit_codes("tpuport compile"):
        given = {
            "mesh": _sizes(mesh),
            "rules": rules,
            "train": train,
            "optimizer": None if optimizer == "none" else optimizer,
            "method": method,
            "kernel_times": not no_kernel_times,
            "quick": quick,
            "calibration": calibration,
            "strict": strict,
            **_wanted(target),
        }
        ported, inputs = _ported(given.pop("model"), target, method), given.pop("inputs")
        if search:
            if mesh or rules != "fsdp":
                raise UsageError("--mesh and --rules are what --search looks for; leave them out")
            found = _search(ported, topology, inputs, given, minutes * _MINUTE)
            typer.echo(found.to_json() if as_json else str(found))
            for path in out or ():
                found.save(path)
                say(f"wrote {path}")
            if not found.ranked:
                raise typer.Exit(DOES_NOT_FIT if found.trials else WRONG_CALL)
            return
        with importing():
            from tpuport.aot.compile_for import compile_for

        report = compile_for(ported, topology, inputs=inputs, **given)
        _show(report, as_json=as_json)
        for path in out or ():
            report.save(path)
            say(f"wrote {path}")
        if not report.fits:
            raise typer.Exit(DOES_NOT_FIT)


def _wanted(target: str) -> dict[str, Any]:
    """Call the function named on the command line, and return its result as arguments by name."""
    from tpuport.compat.runner.target import load_target

    match load_target(target)():
        case {"model": _, "inputs": _, **rest} as found:
            del rest
            return dict(found)
        case (model, inputs):
            return {"model": model, "inputs": inputs}
        case other:
            raise UsageError(
                f"{target} returned a {type(other).__name__}: expected (model, inputs), or a dict"
                ' with "model" and "inputs"'
            )


def _ported(model: Any, target: str, method: str) -> Any:
    """Port the model if it is a plain module; return a ported model or training step unchanged."""
    with importing():
        import torch

        from tpuport.model.convert import convert
        from tpuport.model.ported_model import PortedModel
        from tpuport.training.step_function import Training

    if isinstance(model, PortedModel) or isinstance(getattr(model, "training", None), Training):
        return model
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{target}: expected a module as the model, got a {type(model).__name__}")
    return convert(model, methods=tuple(dict.fromkeys(("forward", method))))


def _sizes(text: str | None) -> dict[str, int] | None:
    """Parse `fsdp=4,tensor=2` to sizes by mesh axis."""
    if text is None:
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, sign, size = part.strip().partition("=")
        if not sign or not size.removeprefix("-").isdigit():
            raise UsageError(
                f"--mesh: expected sizes by axis such as fsdp=4,tensor=2, got {text!r}"
            )
        sizes[name] = int(size)
    return sizes


def _show(report: "CompileReport", *, as_json: bool) -> None:
    if as_json:
        typer.echo(report.to_json())
    elif has_color():
        from rich.console import Console

        Console(highlight=False).print(report)
    else:
        typer.echo(str(report))


def _search(
    ported: Any, topology: str, inputs: Any, given: dict[str, Any], seconds: float
) -> "SearchReport":
    from rich.console import Console

    from tpuport.aot.search import search

    for name in ("mesh", "rules"):
        given.pop(name, None)
    console = Console(stderr=True, highlight=False)

    def tell(line: str) -> None:
        if not console.is_terminal:
            say(line)

    with console.status("looking for meshes and rules") as status:

        def progress(done: int, total: int, what: str) -> None:
            status.update(f"{done + 1} of {total}: {what}")
            tell(f"{done + 1} of {total}: {what}")

        return search(ported, topology, inputs=inputs, seconds=seconds, progress=progress, **given)


__all__ = ["DOES_NOT_FIT", "FAILED", "compile_"]
