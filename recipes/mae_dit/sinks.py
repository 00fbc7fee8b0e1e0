"""Where the numbers and pictures of a training run go."""

import os
from pathlib import Path

from tpuport.foundation.errors import UsageError
from tpuport.training import JsonLines, TensorBoard, WandB
from tpuport.training.metric_writers import Sink

KNOWN = ("json", "tensorboard", "wandb")


def make_sinks(names: str, out: Path) -> list[Sink]:
    """Return the sinks of a run.

    OUT/log.jsonl is written in any case, as curves and pages are drawn from it. TensorBoard has
    OUT/tensorboard; Weights & Biases has a run whose id is kept in OUT/wandb.id, in the project
    that the environment variable WANDB_PROJECT names.

    Args:
        names: Names of sinks, with commas between them.
        out: Folder of the run.

    Raises:
        UsageError: There is no such sink.
        MissingExtraError: Its package is not installed.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in KNOWN:
            raise UsageError(f"--log {name}: expected {', '.join(KNOWN)}, or several of them")
    sinks: list[Sink] = [JsonLines(out / "log.jsonl")]
    if "tensorboard" in wanted:
        sinks.append(TensorBoard(out / "tensorboard"))
    if "wandb" in wanted:
        project = os.environ.get("WANDB_PROJECT", "mae_dit")
        sinks.append(WandB(project, id_file=out / "wandb.id", dir=str(out)))
    return sinks
