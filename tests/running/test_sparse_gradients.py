"""Gradients that eager PyTorch makes sparse: `nn.Embedding(sparse=True)`, for some optimizers."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpuport
from tpuport.compat.emulated.programs import PortWarning


class Tables(nn.Module):
    """Tables that are read twice, in bags, with padding, and in another way beside."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 4, sparse=True, padding_idx=2)
        self.bags = nn.EmbeddingBag(9, 4, mode="sum", sparse=True, padding_idx=1)
        self.means = nn.EmbeddingBag(7, 4, sparse=True)
        self.short = nn.Embedding(8, 4, sparse=True, max_norm=0.5)
        self.tied = nn.Embedding(6, 4, sparse=True)
        self.last = nn.Linear(4, 1)

    def forward(self, words: torch.Tensor, many: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        # A row that ReLU takes all of is read, though its gradient is zero.
        hidden = torch.relu(self.words(words).sum(1)) + torch.relu(self.bags(many, of))
        hidden = hidden + self.words(words.flip(1)[:, :1]).mean(1) + self.means(many % 7, of)
        hidden = hidden + self.short(words[:, 0] % 8).tanh()
        tied = self.tied(words[:, 0] % 6) @ self.tied.weight.T
        return self.last(hidden) + tied.sum(1, keepdim=True)


class RowWise(torch.optim.Optimizer):
    """Adagrad with one number for each row, which treats a dense gradient otherwise."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad
            if not gradient.is_sparse:
                parameter.sub_(gradient)
                continue
            gradient = gradient.coalesce()
            (rows,), values = gradient.indices(), gradient.values()
            parameter[rows] -= 0.1 * values / (values.square().mean(1, keepdim=True).sqrt() + 0.1)


def trained(device: str, rows: type[torch.optim.Optimizer]) -> tuple[list[object], list[float]]:
    """Return which rows have a gradient in each of three steps, and the parameters at the end."""
    torch.manual_seed(0)
    model = Tables().to(device)
    sparse = [t.weight for t in (model.words, model.bags, model.means, model.short)]
    others = [p for p in model.parameters() if all(p is not one for one in sparse)]
    optimizers = [rows(sparse), torch.optim.SGD(others, 0.1)]
    generator = torch.Generator().manual_seed(1)
    seen: list[object] = []
    for _ in range(3):
        words = torch.randint(0, 12, (3, 5), generator=generator).to(device)
        many = torch.randint(0, 9, (7,), generator=generator).to(device)
        for one in optimizers:
            one.zero_grad()
        model(words, many, torch.tensor([0, 2, 2], device=device)).square().mean().backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            found = gradient.coalesce().indices().tolist() if gradient.is_sparse else "dense"
            seen.append(found)
        for one in optimizers:
            one.step()
    return seen, [x for p in model.parameters() for x in p.detach().cpu().flatten().tolist()]


@pytest.mark.parametrize("rows", [torch.optim.SparseAdam, RowWise])
def test_optimizers_get_the_gradients_that_they_ask_for(rows: type[torch.optim.Optimizer]) -> None:
    expected = trained("cpu", rows)
    with tpuport.porting():
        found = trained("cuda", rows)
    assert found[0] == expected[0]
    assert "dense" in expected[0][:6]
    assert expected[0][0] != "dense"
    assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-5)


class Recomputed(nn.Module):
    """A table that is read in a checkpointed region."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, sparse=True)
        self.last = nn.Linear(3, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.words, words, use_reentrant=False))


def test_a_table_in_a_region_is_a_program_of_its_own() -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Recomputed().to(device)
        model(torch.tensor([1, 3, 1], device=device)).sum().backward()
        gradient = model.words.weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        gradient = gradient.coalesce()
        return [gradient.indices(), gradient.values().cpu()]

    expected = run("cpu")
    with tpuport.porting(), pytest.warns(PortWarning, match="sparse=True"):
        found = run("cuda")
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.line = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)

    def forward(self, hidden: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.line(hidden)) + self.words(words)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(len(words), 3, device=words.device)
        for block in self.blocks:
            hidden = block(hidden, words)
        return hidden.sum()


@pytest.mark.filterwarnings("error::tpuport.compat.emulated.programs.PortWarning")
def test_equal_blocks_with_such_tables_are_one_program() -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Stack().to(device)
        model(torch.tensor([1, 3, 1], device=device)).backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert sum(g.is_sparse for g in found) == 4
        return [g.to_dense().cpu() for g in found]

    expected = run("cpu")
    with tpuport.porting():
        torch.testing.assert_close(run("cuda"), expected)
