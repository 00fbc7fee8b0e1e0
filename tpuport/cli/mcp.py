"""`tpuport mcp`: commands of tpuport for coding agents, by the Model Context Protocol."""

from pathlib import Path
from typing import Annotated

import typer

from tpuport.cli._common import errors_as_exit_codes

Folder = Annotated[
    Path,
    typer.Argument(
        exists=True,
        file_okay=False,
        show_default=False,
        help="The folder that paths have to be in.",
    ),
]
Seconds = Annotated[
    float, typer.Option(min=1.0, metavar="S", help="The longest time of a command.")
]
Characters = Annotated[
    int, typer.Option(min=1000, metavar="N", help="The most characters of a command's output.")
]


def mcp(
    folder: Folder = Path("."), seconds: Seconds = 600.0, characters: Characters = 20_000
) -> None:
    """Serve lint, run, verify, verify_port and compile to a coding agent on standard input.

    Paths outside of the folder are refused, commands are stopped after their
    time with all that they started. The code that an agent runs has your rights.
    """
    with errors_as_exit_codes("tpuport mcp"):
        from tpuport.servers.mcp_server import server

        server(folder, seconds=seconds, characters=characters).run("stdio")
