"""Shared parts of the recipes' command lines: commands that are imported only when they are run."""

import importlib
import importlib.util
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from tpuport.foundation.errors import UsageError


class Precision(StrEnum):
    """The precision that models compute in."""

    BF16 = "bf16"
    FLOAT32 = "float32"


def mesh_sizes(text: str | None) -> dict[str, int] | None:
    """Parse mesh axis sizes such as `fsdp=4,tensor=2`.

    Raises:
        UsageError: The text has another form.
    """
    if text is None:
        return None
    parts = [part.partition("=") for part in text.split(",")]
    try:
        return {name.strip(): int(size) for name, _, size in parts}
    except ValueError:
        raise UsageError(f"mesh={text!r}: expected sizes by axis, such as fsdp=8") from None


def make_app(package: str, commands: Mapping[str, tuple[str, str]], about: str) -> typer.Typer:
    """Return a command line that imports each command only when it is asked for.

    Args:
        package: The recipe's package, such as "recipes.recogdrive".
        commands: Module and function of each command, by name, in the order in which they are run.
        about: Help text of the command line.
    """

    class Commands(TyperGroup):
        """The recipe's commands."""

        def list_commands(self, ctx: object) -> list[str]:
            """Return the names of the commands whose modules exist."""
            del ctx
            return [
                name
                for name, (module, _) in commands.items()
                if importlib.util.find_spec(f"{package}.{module}") is not None
            ]

        def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | None:
            """Return a command, or None if there is none of that name."""
            if cmd_name not in self.list_commands(ctx):
                return None
            module, function = commands[cmd_name]
            return _command(
                cmd_name, getattr(importlib.import_module(f"{package}.{module}"), function)
            )

    app = typer.Typer(
        name=package.rpartition(".")[2],
        cls=Commands,
        help=about,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
    )
    app.callback(help=about)(lambda: None)
    return app


def _command(name: str, function: Any) -> TyperCommand:
    single = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    settings = getattr(function, "context_settings", None)
    single.command(name, context_settings=settings)(function)
    command = typer.main.get_command(single)
    assert isinstance(command, TyperCommand)
    return command
