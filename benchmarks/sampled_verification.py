"""`python -m benchmarks.sampled_verification`: what `verify="sample"` costs, for ten models.

Writes the table of docs/verification.md. Each model is converted twice, with `verify="sample"` and
with `verify="first"`, and both are called 1,000 times in turns of 50. The time that a comparison
still takes after a turn is counted as the sampled one's. With one core (`--cores 1`, the default)
the comparison takes its time away from the calls.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import machine
from benchmarks.timing import quiet

PAGE = Path(__file__).parent.parent / "docs" / "verification.md"
START, END = "<!-- sampled -->\n", "<!-- end -->\n"
TURN = 50


@dataclass(frozen=True)
class Row:
    """What one model's calls took.

    Attributes:
        model: What it is.
        call: Seconds of a call that is not sampled.
        eager: Seconds of a call of eager PyTorch.
        compared: How many of the calls were compared, by round.
        ratios: Time with sampling by time without, by round.
    """

    model: str
    call: float
    eager: float
    compared: list[int]
    ratios: list[float]


class Residual(nn.Module):
    """Three blocks of convolutions with batch norms, and skips around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
                *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)),
            )
            for _ in range(3)
        )
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        x = self.first(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.last(x.mean((2, 3)))


class Recurrent(nn.Module):
    """A two-layer LSTM that reads tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.lstm = nn.LSTM(32, 64, 2, batch_first=True)
        self.last = nn.Linear(64, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        return self.last(self.lstm(self.embedding(tokens))[0][:, -1])


class Graph(nn.Module):
    """Two rounds of messages that are summed by node."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(64, 32), nn.GRUCell(32, 32)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return features of the nodes."""
        for _ in range(2):
            sent = torch.relu(self.message(torch.cat([x[edges[0]], x[edges[1]]], 1)))
            x = self.update(torch.zeros_like(x).index_add(0, edges[1], sent), x)
        return x


class Variational(nn.Module):
    """An autoencoder that draws its code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(196, 128), nn.ReLU(), nn.Linear(128, 32))
        self.decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 196))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the image, the mean and the logarithm of the variance."""
        mean, log_var = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_var / 2).exp()
        return torch.sigmoid(self.decoder(code)), mean, log_var


class Masked(nn.Module):
    """Rows chosen by a mask of values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows, those with a positive sum changed."""
        chosen = x.sum(1) > 0
        x = x.clone()
        x[chosen] = torch.tanh(self.inner(x[chosen]))
        return x + x[chosen].mean()


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Return ten models with arguments."""
    from transformers import (
        BertConfig,
        BertModel,
        LlamaConfig,
        LlamaForCausalLM,
        ViTConfig,
        ViTForImageClassification,
    )

    torch.manual_seed(0)
    wide: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    words: dict[str, Any] = {**wide, "num_attention_heads": 4, "vocab_size": 200}
    picture = torch.randn(4, 3, 32, 32)
    tokens, nodes = torch.randint(0, 100, (4, 32)), 64
    mlp = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    convolutions = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    image = ViTConfig(**wide, num_attention_heads=4, image_size=32, patch_size=8)
    return {
        "MLP, batch 8": (mlp, (torch.randn(8, 8),)),
        "convolutions": (convolutions, (picture,)),
        "residual net": (Residual(), (picture,)),
        "LSTM": (Recurrent(), (tokens,)),
        "graph": (Graph(), (torch.randn(nodes, 32), torch.randint(0, nodes, (2, 256)))),
        "variational autoencoder": (Variational(), (torch.rand(16, 196),)),
        "rows by a mask": (Masked(), (torch.randn(64, 64),)),
        "BERT": (BertModel(BertConfig(**words)), (tokens,)),
        "Llama": (LlamaForCausalLM(LlamaConfig(**words, use_cache=False)), (tokens,)),
        "ViT": (ViTForImageClassification(image), (picture,)),
    }


def measure(name: str, model: nn.Module, inputs: tuple[Any, ...], rounds: int, calls: int) -> Row:
    """Call both ports of a model in turns."""
    import tpuport
    from tpuport.model.parity import sampling

    model = model.eval()
    ports = {how: tpuport.convert(model, verify=how) for how in ("sample", "first")}
    sampler = ports["sample"]._sampler
    assert sampler is not None
    counted = _counting(sampler)
    for _ in range(20):
        for ported in ports.values():
            ported(*inputs)
        # The first comparisons import and compile, and the wait for the next one is as long.
        sampler._next = min(sampler._next, 0.0)
        sampling._WORKER.submit(int).result()
    eager = min(_timed(lambda: model(*inputs)) for _ in range(10))
    ratios, compared, plain = [], [], []
    for _ in range(rounds):
        counted.clear()
        spent = dict.fromkeys(ports, 0.0)
        with quiet():
            for turn in range(calls // TURN):
                for how in list(ports)[:: 1 if turn % 2 else -1]:
                    took = _timed(lambda how=how: _turn(ports[how], inputs, sampling._WORKER))
                    spent[how] += took
                    if how == "first":
                        sampler._next += took  # the sampled one's clock stands still meanwhile
        ratios.append(spent["sample"] / spent["first"])
        compared.append(len(counted))
        plain.append(spent["first"] / calls)
    assert ports["sample"].report.verified, ports["sample"].report
    return Row(name, statistics.median(plain), eager, compared, ratios)


def _turn(ported: Any, inputs: tuple[Any, ...], worker: ThreadPoolExecutor) -> None:
    for _ in range(TURN):
        ported(*inputs)
    worker.submit(int).result()  # a comparison may be under way


def _counting(sampler: Any) -> list[float]:
    """Return the cost of each comparison that a sampler makes from now on."""
    costs: list[float] = []
    wait_for = sampler.wait_for

    def counted(cost: float) -> None:
        costs.append(cost)
        wait_for(cost)

    sampler.wait_for = counted
    return costs


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def table(rows: list[Row]) -> str:
    """Return the table."""
    lines = [
        "| model | a call | eager PyTorch | compared | time with / without |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        few, many = min(row.compared), max(row.compared)
        lines.append(
            f"| {row.model} | {row.call * 1e6:.0f} µs | {row.eager * 1e6:.0f} µs |"
            f" {few} to {many} | {statistics.median(row.ratios):.3f}"
            f" ({min(row.ratios):.3f} to {max(row.ratios):.3f}) |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, and write the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--only", default="")
    parser.add_argument("--cores", type=int, default=1)
    options = parser.parse_args()
    machine.use_cores(options.cores)  # before XLA starts
    torch.set_num_threads(machine.num_cores())
    rows = []
    for name, (model, inputs) in models().items():
        if options.only in name:
            with torch.no_grad():
                rows.append(measure(name, model, inputs, options.rounds, options.calls))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    if not options.only:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{START}{table(rows)}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
