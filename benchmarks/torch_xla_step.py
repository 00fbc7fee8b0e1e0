"""A training step of torch_xla 2.9 and the same step moved to tpuport, side by side on the CPU.

    python -m benchmarks.torch_xla_step --torch-xla /path/of/another/python

The other environment has torch 2.9 and torch_xla 2.9, which do not go with the torch of this one.
Each side runs in processes of its own, in turn, so that other work on the machine slows both down.
Printed are medians, and their ratios.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH, LAYERS, HEADS, WORDS = 128, 2, 4, 512
ROWS, LENGTH = 8, 64
SIDES = ("torch_xla", "tpuport", "tpuport, not compared")
# Seconds of the clock, and of all processors: other work on the machine changes only the former.
MEASURES = ("first step", "first step, processors", "step", "step, processors", "host")


class Decoder(nn.Module):
    """A small transformer, without dropout so that both sides compute the same."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next word."""
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens after the block."""
        rows, length, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, length, 3, HEADS, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def loss_of(model: Any, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    scores = model(words)
    return nn.functional.cross_entropy(scores.view(-1, WORDS), targets.view(-1))


def torch_xla_step(words: torch.Tensor, targets: torch.Tensor) -> Callable[[], Any]:
    """Return a step as torch_xla's documentation writes it; what it returns is read later."""
    import torch_xla  # pyright: ignore[reportMissingImports]

    device = torch_xla.device()
    model = Decoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words, targets = words.to(device), targets.to(device)

    def step() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, words, targets)
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        return loss

    return step


def tpuport_step(
    words: torch.Tensor, targets: torch.Tensor, *, compared: bool
) -> Callable[[], Any]:
    """Return the same step as one program of tpuport."""
    import tpuport
    from tpuport.training import from_torch, make_train_step

    model = Decoder()
    ported = tpuport.convert(model, verify=compared)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train = make_train_step(ported, loss_of, from_torch(ported, optimizer), skip_nonfinite=False)
    state, batch = train.init(), train.place(words, targets)

    def step() -> Any:
        nonlocal state
        state, metrics = train(state, batch)
        return metrics["loss"]

    return step


def measure(side: str, steps: int) -> dict[str, Any]:
    """Return the times of one side in seconds: until the first loss, of a step, and of its call."""
    torch.manual_seed(0)
    words, targets = (torch.randint(WORDS, (ROWS, LENGTH)) for _ in range(2))
    if side == SIDES[0]:
        step = torch_xla_step(words, targets)
    else:
        step = tpuport_step(words, targets, compared=side == SIDES[1])
    started, busy = time.perf_counter(), time.process_time()
    losses = [float(step())]
    first, first_busy = time.perf_counter() - started, time.process_time() - busy
    whole, host, work = [], [], []
    for _ in range(steps):
        begun, busy = time.perf_counter(), time.process_time()
        loss = step()
        called = time.perf_counter()
        losses.append(float(loss))
        whole.append(time.perf_counter() - begun)
        work.append(time.process_time() - busy)
        host.append(called - begun)
    warm = steps // 4
    return {
        "first step": first,
        "first step, processors": first_busy,
        "step": statistics.median(whole[warm:]),
        "step, processors": statistics.median(work[warm:]),
        "host": statistics.median(host[warm:]),
        "losses": losses[:4],
    }


def run(python: str, side: str, steps: int) -> dict[str, Any]:
    """Measure one side in a new process."""
    command = [python, str(Path(__file__)), "--side", side, "--steps", str(steps)]
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Write medians over the runs, in milliseconds, and torch_xla's over each side's."""
    medians = {
        side: {name: statistics.median(one[name] for one in runs) for name in MEASURES}
        for side, runs in found.items()
    }
    lines = [f"| ms | {' | '.join(MEASURES)} |", "|---" * (len(MEASURES) + 1) + "|"]
    for side, values in medians.items():
        cells = []
        for name in MEASURES:
            ratio = medians[SIDES[0]][name] / values[name]
            shown = "" if side == SIDES[0] else f" ({ratio:.2g} x)"
            cells.append(f"{1000 * values[name]:.3g}{shown}")
        lines.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run one side, or all of them in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-xla", default=sys.executable, help="a python with torch_xla 2.9")
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(measure(given.side, given.steps)))
        return
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(given.rounds):
        for side, runs in found.items():
            python = given.torch_xla if side == SIDES[0] else sys.executable
            runs.append(run(python, side, given.steps))
    print(table(found))
    print({side: runs[0]["losses"] for side, runs in found.items()})


if __name__ == "__main__":
    main()
