"""The commands that quantize, serve and compile a policy.

Each imports its framework only when it runs, so that help is fast.
"""

import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from recipes.openpi.commands import RobotName, Size
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


def quantize(
    policy: Policy,
    data: Annotated[Path, typer.Option(help="LeRobot dataset to calibrate on.")],
    scheme: Annotated[Scheme, typer.Option(help="Bits, and DuQuant.")] = Scheme.W8A8,
    robot: Robot = RobotName.LIBERO,
    batches: Annotated[int, typer.Option(help="Pairs of frames to calibrate on.")] = 8,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the policy, to `serve` it.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for the report as JSON.")] = None,
) -> None:
    """Quantize both transformers, and report errors by layer and bytes."""
    with errors_as_exit_codes("quantize"):
        from recipes.openpi.policy import PolicyOptions, freeze_policy

        options = PolicyOptions(robot=robot.value, scheme=scheme.value, data=data)
        report = freeze_policy(policy, options, out, batches=batches)
        typer.echo(str(report))
        if json is not None:
            json.write_text(report.to_json(), encoding="utf-8")
        if out is not None:
            typer.echo(f"the policy is in {out}")


def rollout(
    host: Annotated[str, typer.Option(help="Address of the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.")] = 8000,
    task: Annotated[str, typer.Option(help="Task of gym-aloha.")] = "AlohaTransferCube-v0",
    prompt: Annotated[str, typer.Option(help="Prompt of the policy.")] = "Transfer cube",
    steps: Annotated[int, typer.Option(help="Steps of the simulator; 50 are a second.")] = 300,
    replan: Annotated[int, typer.Option(help="Actions that are taken of each chunk.")] = 10,
    video: Annotated[Path | None, typer.Option(help="Video to write, .mp4.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the scene.")] = 0,
) -> None:
    """Let a served policy act in gym-aloha's simulator, by openpi-client."""
    with errors_as_exit_codes("rollout"):
        from recipes.openpi import rollout as stage

        found = stage.rollout(
            stage.client_of(host, port),
            stage.simulator(task),
            prompt=prompt,
            steps=steps,
            replan=replan,
            video=video,
            seed=seed,
        )
        typer.echo(str(found))


def compile_(
    parts: Annotated[
        list[str] | None, typer.Argument(help="vision, prefix, step, call [default: all].")
    ] = None,
    size: Annotated[Size, typer.Option(help="Size of the policy.")] = Size.PI0,
    topology: Annotated[str, typer.Option("--topology", "-t", help="TPU slice.")] = "v6e-1",
    scheme: Annotated[
        Scheme | None, typer.Option(help="How it is quantized [default: bfloat16].")
    ] = None,
    batch: Annotated[int, typer.Option(help="Observations at a time.")] = 1,
    cameras: Annotated[int, typer.Option(help="Pictures of an observation.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="Let libtpu optimise less or fully.")
    ] = True,
) -> None:
    """Compile a policy call and its parts from shapes alone, for a TPU that need not be there."""
    with errors_as_exit_codes("compile"):
        from recipes.openpi import compile as stage

        reports = {}
        for part, report in stage.compile_parts(
            size.value,
            topology,
            parts=tuple(parts or stage.PARTS),
            batch=batch,
            cameras=cameras,
            scheme=scheme and scheme.value,
            quick=quick,
        ):
            typer.echo(str(report))
            reports[part] = report
        took = stage.milliseconds(reports)
        if took is not None:
            typer.echo(f"a call of ten steps: {took:.1f} ms")


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
    scheme: Annotated[Scheme | None, typer.Option(help="How to quantize a float policy.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="LeRobot dataset to calibrate quantization on.")
    ] = None,
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
            scheme=scheme and scheme.value,
            data=data,
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
