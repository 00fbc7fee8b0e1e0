"""`python -m recipes.recogdrive`: every step from small data to a reinforced planner."""

import importlib
import importlib.util

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

# In the order in which they are run, each with its module and function. A module is imported when
# its command is asked for.
COMMANDS = {
    "make-data": ("commands", "make_data"),
    "finetune": ("chat_commands", "finetune"),
    "cache": ("chat_commands", "cache"),
    "train": ("commands", "train"),
    "grpo": ("commands", "grpo"),
    "sample": ("commands", "sample"),
    "compile": ("commands", "compile_"),
}
_PACKAGE = "recipes.recogdrive"


class Commands(TyperGroup):
    """Commands that are imported one by one."""

    def list_commands(self, ctx: object) -> list[str]:
        """The names of those that are there."""
        del ctx
        return [
            name
            for name, (module, _) in COMMANDS.items()
            if importlib.util.find_spec(f"{_PACKAGE}.{module}") is not None
        ]

    def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | None:
        """One command, or None if there is none of that name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module, function = COMMANDS[cmd_name]
        found = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), function)
        single = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
        settings = getattr(found, "context_settings", None)
        single.command(cmd_name, context_settings=settings)(found)
        command = typer.main.get_command(single)
        assert isinstance(command, TyperCommand)
        return command


app = typer.Typer(
    name="recogdrive",
    cls=Commands,
    help="ReCogDrive on TPU: chat model, cached hidden states, planner, reinforcement.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """ReCogDrive on TPU: chat model, cached hidden states, planner, reinforcement."""


if __name__ == "__main__":
    app(prog_name="python -m recipes.recogdrive")
