"""`tpuport verify-port`: a port that somebody wrote beside its PyTorch original."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tpuport.cli import _options as options
from tpuport.cli._common import FAILED, errors_as_exit_codes, present
from tpuport.foundation.imports import importing

Spec = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        show_default=False,
        help="A Python file or module with a function make() that returns the arguments of"
        " tpuport.verify_port by name. It is executed.",
    ),
]


def verify_port(
    spec: Spec, report: options.ReportFile = None, as_json: options.AsJson = False
) -> None:
    """Compare a port that was written by hand or by an agent with its PyTorch original.

    Three stages: the interface; outputs, losses, gradients and values in
    between; some steps of training. Exit code 1 if the two differ.
    """
    with errors_as_exit_codes("tpuport verify-port"):
        with importing():
            from tpuport.verify.ports.verify_port import verify_port as compare

        options.check_report_name(report)
        found = compare(**_arguments(spec))
        present(found, report, as_json=as_json)
    if not found.passed:
        raise typer.Exit(FAILED)


def _arguments(spec: str) -> dict[str, Any]:
    """Execute a specification and return the arguments that it makes.

    Raises:
        UsageError: there is no such file or module, or it has no `make`.
    """
    import inspect

    from tpuport.foundation.errors import UsageError
    from tpuport.verify.ports.verify_port import verify_port as compare

    module = _imported(spec)
    make = getattr(module, "make", None)
    if not callable(make):
        raise UsageError(f"{spec} has no function make() that returns arguments of verify_port.")
    made = make()
    known = list(inspect.signature(compare).parameters)
    if not isinstance(made, dict) or not set(made) <= set(known):
        raise UsageError(f"make() of {spec} is to return a dict with some of: {', '.join(known)}.")
    return made


def _imported(spec: str) -> Any:
    import importlib
    import importlib.util
    import sys

    from tpuport.foundation.errors import UsageError

    path = Path(spec)
    if path.suffix == ".py":
        if not path.is_file():
            raise UsageError(f"There is no file {spec}.")
        sys.path.insert(0, str(path.parent.absolute()))
        form = importlib.util.spec_from_file_location(path.stem, path)
        assert form is not None
        assert form.loader is not None
        module = importlib.util.module_from_spec(form)
        sys.modules[path.stem] = module
        form.loader.exec_module(module)
        return module
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(spec)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{spec}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"There is no module {spec}.") from None
