"""Trajectories of a trained planner for the scenes of a cache, by one compiled program."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tpuport
from recipes.recogdrive.hosts import refuse_several
from recipes.recogdrive.layouts import CacheDataset
from recipes.recogdrive.plots import check_plots, plot_trajectories
from recipes.recogdrive.train import kind_of
from recipes.recogdrive.validation import Validation, errors_of
from recipes.recogdrive.weights import config_of, read_weights
from tpuport.checkpoints.atomic import replacing_file

_PLOTTED = 8


def sample(
    cache: str | Path,
    checkpoint: str | Path,
    out: str | Path,
    *,
    batch_size: int = 16,
    logs: Sequence[str] | None = None,
    plot: str | Path | None = None,
    checkout: str | Path | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Sample one trajectory a scene, and write them as JSON.

    Args:
        cache: of either layout.
        checkpoint: a planner of this recipe or of upstream; it says size and sampler.
        out: the file: `{"trajectories": {token: [[x, y, heading], ...]}, ...}`, metres and radians.
        batch_size: scenes at once.
        logs: drives to sample for; by default all.
        plot: a picture of the first scenes.
        checkout: an upstream checkout, whose own planner samples then.
        verify: compare the first batch with eager PyTorch on the same random numbers.

    Returns:
        What is written besides the trajectories: `scenes`, what `errors_of` gives, `verified`, and
        `programs`, how many were compiled.

    Raises:
        UsageError: there are several processes, or an argument does not fit.
        ParityError: the program's trajectories are not eager PyTorch's.
        CheckpointError: there is no planner in the checkpoint.
    """
    refuse_several("sampling", "which writes one file")
    if plot is not None:
        check_plots()
    dataset = CacheDataset(cache, logs=logs)
    weights = read_weights(checkpoint)
    config, sampler = config_of(weights)
    with kind_of(checkout) as kind:
        planner = kind.make(config, sampler, state_width=config.state_width)
        planner.load_state_dict(weights)
        ported = tpuport.convert(planner.eval(), methods=(kind.sample,), verify=verify)
        program = getattr(ported, kind.sample.__name__)
        validation = Validation(dataset, batch_size, kind.sample.__name__, ema=False)
        kept = [
            (tpuport.to_torch(program(batch))[:count].float(), batch["trajectory"][:count])
            for batch, count in validation.batches()
        ]
    predicted, true = (torch.cat(part) for part in zip(*kept, strict=True))
    found = {
        "scenes": len(dataset),
        **errors_of(predicted, true),
        "verified": ported.report.verified,
        "programs": 1 + len(ported.report.retraces),
    }
    trajectories = dict(zip(dataset.tokens, predicted.tolist(), strict=True))
    _write_json(Path(out), {**found, "trajectories": trajectories})
    if plot is not None:
        plot_trajectories(plot, predicted[:_PLOTTED], true[:_PLOTTED])
    return found


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as temporary:
        temporary.write_text(json.dumps(values))
