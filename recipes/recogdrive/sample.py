"""Trajectories of a trained planner for the scenes of a cache, by one compiled program."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tpuport
from recipes.hosts import refuse_several
from recipes.recogdrive.layouts import CacheDataset
from recipes.recogdrive.plots import check_plots, plot_trajectories
from recipes.recogdrive.train import kind_of
from recipes.recogdrive.validation import Validation, errors_of
from recipes.recogdrive.weights import config_of, read_weights
from tpuport.foundation.files import replacing_file

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
    """Sample one trajectory per scene, and write them as JSON.

    Args:
        cache: Cache of either layout.
        checkpoint: Planner of this recipe or of upstream, which determines size and sampler.
        out: File to write: `{"trajectories": {token: [[x, y, heading], ...]}, ...}`, in m and rad.
        batch_size: Scenes per batch.
        logs: Drives to sample for; by default all.
        plot: Picture of the first scenes to write.
        checkout: Upstream checkout, to sample with its own planner.
        verify: Whether to compare the first batch with eager PyTorch on the same random numbers.

    Returns:
        What is written besides the trajectories: `scenes`, the result of `errors_of`, `verified`,
        and the number of compiled `programs`.

    Raises:
        UsageError: There are several processes, or an argument does not fit.
        ParityError: The program's trajectories differ from eager PyTorch's.
        CheckpointError: There is no planner in the checkpoint.
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
