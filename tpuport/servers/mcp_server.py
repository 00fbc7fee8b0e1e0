"""An MCP server: lint, run, verify, verify_port and compile for coding agents."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from tpuport.foundation.errors import UsageError
from tpuport.foundation.version import __version__
from tpuport.servers.bounds import Bounds, CommandOutcome

_INSTRUCTIONS = (
    "Ports PyTorch code to JAX and TPU and compares ports with their originals. Paths are relative"
    " to the folder of this server. status is the exit status of a command: 0 all is well, 1"
    " findings or a difference, 2 a wrong call, null if it was stopped after its time. run, verify,"
    " verify_port and compile execute the code that they are given."
)


class Commands:
    """The commands as an agent calls them, one at a time.

    Args:
        bounds: The limits.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._turn = anyio.CapacityLimiter(1)

    async def _run(
        self,
        paths: Sequence[str],
        before: Sequence[str],
        after: Sequence[str],
        seconds: float | None,
    ) -> CommandOutcome:
        try:
            named = [self._bounds.path(path) for path in paths]
        except UsageError as error:
            raise ToolError(str(error)) from None
        arguments = [*before, *named, *after]
        call = partial(self._bounds.run, arguments, seconds)
        return await anyio.to_thread.run_sync(call, limiter=self._turn)

    async def lint(
        self, paths: list[str] | None = None, select: str = "ALL", seconds: float | None = None
    ) -> CommandOutcome:
        """Find what breaks, goes silently wrong or gets slow on TPU. Reads files, runs nothing.

        Args:
            paths: Files and folders; the whole folder if left out.
            select: Codes of rules or their starts, with commas: TPU1,TPU501.
            seconds: The longest time.
        """
        options = [f"--select={select}", "--format=concise", "--no-cache"]
        return await self._run(paths or ["."], ["lint", *options], (), seconds)

    async def run(
        self, script: str, arguments: list[str] | None = None, seconds: float | None = None
    ) -> CommandOutcome:
        """Run a script that was written for CUDA, ported, as `tpuport run` does. Executes it.

        Args:
            script: A Python file.
            arguments: The arguments of the script.
            seconds: The longest time.
        """
        return await self._run([script], ["run"], arguments or (), seconds)

    async def verify(
        self,
        script: str,
        arguments: list[str] | None = None,
        steps: int = 20,
        seconds: float | None = None,
    ) -> CommandOutcome:
        """Run a training script in eager PyTorch and ported, and compare them. Executes it.

        Args:
            script: A Python file that trains.
            arguments: The arguments of the script.
            steps: Stop after so many steps of an optimizer.
            seconds: The longest time, of both runs together.
        """
        rest = ["--", *arguments] if arguments else []
        return await self._run([script], ["verify", f"--steps={steps}", "--json"], rest, seconds)

    async def verify_port(self, spec: str, seconds: float | None = None) -> CommandOutcome:
        """Compare a JAX port with its PyTorch original: where do they part? Executes both.

        Args:
            spec: A Python file with a function make() that returns the arguments of
                tpuport.verify_port by name: torch_model, jax_function, params, args and more.
            seconds: The longest time.
        """
        return await self._run([spec], ["verify-port", "--json"], (), seconds)

    async def compile(
        self,
        file: str,
        function: str,
        topology: str = "v6e-8",
        train: bool = False,
        seconds: float | None = None,
    ) -> CommandOutcome:
        """Compile a model for a TPU slice without having one: does it fit? Executes the file.

        Args:
            file: A Python file.
            function: A function in it without arguments that returns (model, inputs).
            topology: The slice, such as v6e-8.
            train: Whether to compile a training step.
            seconds: The longest time.
        """
        if not function.isidentifier():
            raise ToolError(f"Expected the name of a function, got {function!r}.")
        try:
            target = f"{self._bounds.path(file)}:{function}"
        except UsageError as error:
            raise ToolError(str(error)) from None
        more = ["--train"] if train else []
        return await self._run(
            [], ["compile", target, f"--topology={topology}", "--json", *more], (), seconds
        )


def server(folder: Path, *, seconds: float, characters: int) -> MCPServer:
    """Return a server for one folder.

    Args:
        folder: The folder that paths have to be in.
        seconds: The longest time of a command.
        characters: The most characters of output.
    """
    made = MCPServer("tpuport", instructions=_INSTRUCTIONS, version=__version__)
    commands = Commands(Bounds(folder, seconds, characters))
    for tool in (
        commands.lint,
        commands.run,
        commands.verify,
        commands.verify_port,
        commands.compile,
    ):
        made.tool()(tool)
    return made
