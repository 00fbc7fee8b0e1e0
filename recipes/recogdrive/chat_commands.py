"""The commands of the chat model, whose flags are parsed like upstream's: `--freeze_llm True`.

Each imports its framework only when it runs, so that help is fast.
"""

from collections.abc import Callable
from typing import Any

import typer

from tpuport.cli._common import errors_as_exit_codes

# The command's own parser gets all arguments, and prints its own help.
_OWN_PARSER = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}


def _with_own_parser(command: Callable[..., None]) -> Callable[..., None]:
    settings: Any = command
    settings.context_settings = _OWN_PARSER
    return command


@_with_own_parser
def finetune(context: typer.Context) -> None:
    """Fine-tune the chat model on conversations about driving (stage 1)."""
    with errors_as_exit_codes("finetune"):
        from recipes.recogdrive.finetune import main

        main(context.args)


@_with_own_parser
def cache(context: typer.Context) -> None:
    """Cache the chat model's last hidden states of scenes, for the planner."""
    with errors_as_exit_codes("cache"):
        from recipes.recogdrive.cache import main

        main(context.args)
