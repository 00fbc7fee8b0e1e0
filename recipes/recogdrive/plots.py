"""Plots of trajectories from above: predicted ones next to driven ones."""

import importlib.util
import math
from pathlib import Path

import torch

from tpuport.foundation.errors import MissingExtraError
from tpuport.foundation.files import replacing_file

_TRUE, _PREDICTED, _EGO = "#1a7f37", "#0969da", "#57606a"


def check_plots() -> None:
    """Raise an error unless plots can be drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("a plot of trajectories", "matplotlib", "docs")


def plot_trajectories(
    path: str | Path, predicted: torch.Tensor, true: torch.Tensor | None = None, *, columns: int = 4
) -> None:
    """Draw trajectories from above, one panel per scene: forward is up, left is left.

    Args:
        path: File of the picture, whose suffix is the format, such as .png or .svg.
        predicted: (scenes, 8, 3) or (scenes, samples, 8, 3), metres and radians.
        true: (scenes, 8, 3), if known.
        columns: Panels per row.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    check_plots()
    from matplotlib.figure import Figure

    samples = predicted.unsqueeze(1) if predicted.ndim == 3 else predicted
    columns = min(columns, len(samples))
    rows = math.ceil(len(samples) / columns)
    figure = Figure(figsize=(2.6 * columns, 3.0 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels[len(samples) :]:
        panel.set_axis_off()
    origin = torch.zeros(1, 3)
    for index, (panel, scene) in enumerate(zip(panels, samples.cpu(), strict=False)):
        if true is not None:
            poses = torch.cat([origin, true[index].cpu().float()])
            panel.plot(-poses[:, 1], poses[:, 0], "o-", color=_TRUE, ms=3, label="true")
        for number, sample in enumerate(scene.float()):
            poses = torch.cat([origin, sample])
            label = "predicted" if number == 0 else None
            panel.plot(-poses[:, 1], poses[:, 0], ".--", color=_PREDICTED, ms=4, lw=1, label=label)
        panel.plot(0, 0, "s", color=_EGO, ms=5)
        panel.set_aspect("equal", adjustable="datalim")
        panel.grid(alpha=0.3, lw=0.5)
        panel.tick_params(labelsize=7)
    panels[0].legend(fontsize=7, loc="lower left")
    figure.supxlabel("right (m)", fontsize=8)
    figure.supylabel("forward (m)", fontsize=8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=110)
