"""Trains over all processes' devices; run as a module by each of two processes."""

import json
import sys
from pathlib import Path
from typing import Any

import optax
import torch

import tpuport
from tests.training.small import Small, loss
from tpuport.sharding import fsdp, make_mesh
from tpuport.training import Batches, JsonLines, fit, initialize, make_train_step


class Samples(torch.utils.data.Dataset):
    """Random numbers by index, with noise of their own; says which ones were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(8, generator=generator) + 0.1 * torch.rand(8),
            "y": torch.randint(0, 4, (), generator=generator),
        }


def train(folder: Path, steps: int, sizes: dict[str, int] | None, samples: Samples) -> Any:
    """Train up to a step with the states in a folder, over a mesh or on one device."""
    torch.manual_seed(0)
    ported = tpuport.convert(Small(0.1, width=64), verify=False)
    if sizes is not None:
        mesh = make_mesh(sizes)
        tpuport.shard(ported, mesh, fsdp(ported, mesh, min_size=64))
    step = make_train_step(ported, loss, optax.adamw(1e-2), clip_norm=1.0)
    return fit(
        step,
        Batches(samples, batch_size=16, seed=1),
        steps=steps,
        checkpoints=folder / "states",
        log_every=1,
        sinks=JsonLines(folder / "log.jsonl"),
        progress=False,
    )


if __name__ == "__main__":
    hosts = initialize()
    samples = Samples()
    try:
        train(Path(sys.argv[1]), 100_000, {"fsdp": -1}, samples)
    finally:
        about = {"count": hosts.count, "found": hosts.found, "read": samples.read}
        Path(sys.argv[1], f"{hosts.process}.json").write_text(json.dumps(about))
