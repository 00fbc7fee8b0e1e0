"""Commands whose script has arguments of its own, after `--`."""

from typing import Any

import typer
from typer.core import TyperCommand

# typer may have click as a part of its own, and shows this class of it only by those below.
_WrongCall: type[Exception] = typer.BadParameter.__mro__[1]


class ScriptCommand(TyperCommand):
    """A command that says where options of the script go if it gets one of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command's name.

        Args:
            ctx: The context of click.
            args: The words.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except _WrongCall as error:
            option: Any = getattr(error, "option_name", None)
            if option is not None and "--" not in given:
                place: Any = error
                place.message += f". Options of the script go after --, as in `-- {option}`"
            raise
