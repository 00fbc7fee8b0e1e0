"""The commands that quantize, serve and compile a policy.

Each imports its framework only when it runs, so that help is fast.
"""

import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from recipes.openpi.commands import RobotName
from tpuport.cli._common import errors_as_exit_codes

Policy = Annotated[Path, typer.Option(help="Folder of the policy.")]
Robot = Annotated[RobotName, typer.Option(help="Robot whose observations it gets.")]


class Scheme(StrEnum):
    """How both transformers are quantized."""

    W8A8 = "w8a8"
    W8A16 = "w8a16"
    W4A8 = "w4a8"
    W4A16 = "w4a16"
    DUQUANT = "duquant-w4a8"


def serve(
    policy: Policy,
    robot: Robot = RobotName.LIBERO,
    prompt: Annotated[
        str | None, typer.Option(help="Prompt of observations that have none.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 for any.")] = 8000,
    batch: Annotated[
        list[int] | None, typer.Option(help="Size of batches; repeatable [default: 1, 4].")
    ] = None,
    prompt_length: Annotated[
        list[int] | None,
        typer.Option(help="Length of prompts in tokens, besides the longest; repeatable."),
    ] = None,
    num_steps: Annotated[int, typer.Option(help="Steps of the flow.")] = 10,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16.")] = False,
    wait_ms: Annotated[float, typer.Option(help="How long a batch waits for others.")] = 2.0,
    max_clients: Annotated[int, typer.Option(help="Connections at a time.")] = 64,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that clients have to send.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder of compiled programs, to start faster.")
    ] = None,
) -> None:
    """Serve a policy to openpi-client until the process is ended."""
    with errors_as_exit_codes("serve"):
        import tpuport
        from recipes.openpi import serve as stage
        from recipes.openpi.policy import PolicyOptions, load_policy

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        logging.getLogger("websockets").setLevel(logging.WARNING)
        tpuport.compile_cache(cache_dir)
        given = PolicyOptions(
            robot=robot.value,
            prompt=prompt,
            num_steps=num_steps,
            batch_sizes=tuple(batch or (1, 4)),
            prompt_lengths=tuple(prompt_length or ()),
            bf16=bf16,
        )
        options = stage.ServeOptions(
            host=host,
            port=port,
            api_key=api_key_file and api_key_file.read_text(encoding="utf-8").strip(),
            wait_ms=wait_ms,
            max_clients=max_clients,
        )
        answered = stage.serve(
            load_policy(policy, given),
            options,
            lambda server: typer.echo(f"serving at ws://{host}:{server.port}"),
        )
        typer.echo(f"{answered} observations answered")
