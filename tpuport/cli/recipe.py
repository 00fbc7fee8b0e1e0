"""`tpuport recipe`: the recipes, from a clone or from the wheel that has them."""

import os
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from tpuport.cli._common import errors_as_exit_codes

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", show_default=False, help="A recipe; lists them if left out."),
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="The command of the recipe.")
]


def recipe(name: Name = None, args: Arguments = None) -> None:
    """Run a command of a recipe: complete ports of published models, from data to a result.

    `tpuport recipe recogdrive --help` lists the commands of one. In a clone it is
    the same as `python -m recipes.recogdrive`. What a recipe reads comes with the
    extras [recipes], [openpilot] and [openpi].
    """
    with errors_as_exit_codes("tpuport recipe"):
        from tpuport.foundation.errors import UsageError

        home = recipes_folder()
        known = sorted(path.parent.name for path in (home / "recipes").glob("*/__main__.py"))
        if name is None:
            typer.echo("\n".join(known))
            return
        if name not in known:
            raise UsageError(f"There is no recipe {name}. There are: {', '.join(known)}.")
        # Processes that a recipe starts find it as this one does.
        paths = [str(home), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        sys.path.insert(0, str(home))
        sys.argv = [f"tpuport recipe {name}", *(args or ())]
    runpy.run_module(f"recipes.{name}", run_name="__main__", alter_sys=True)


def recipes_folder() -> Path:
    """Return the folder that holds the package of the recipes.

    Raises:
        UsageError: they are not part of this installation.
    """
    from tpuport.foundation.errors import UsageError

    package = Path(__file__).parents[1]
    for folder in (package / "bundled", package.parent):
        if (folder / "recipes" / "command_line.py").is_file():
            return folder
    raise UsageError("The recipes are not here. What to do: pip install the wheel of tpuport")
