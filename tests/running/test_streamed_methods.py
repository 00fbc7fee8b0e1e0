"""Methods with a loop around their own calls that tell somebody of each round."""

from typing import Any

import torch
from torch import nn

import tpuport


class Collector:
    def __init__(self) -> None:
        self.said: list[str] = []

    def put(self, value: torch.Tensor) -> None:
        self.said.append(f"got {value.flatten().tolist()}")


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(ids).cumsum(1))

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, n: int, streamer: Any = None) -> torch.Tensor:
        for _ in range(n):
            token = self(ids)[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], dim=-1)
            if streamer is not None:
                streamer.put(token.cpu())
        return ids

    @torch.no_grad()
    def told(self, ids: torch.Tensor, n: int, *, each: Any) -> torch.Tensor:
        for i in range(n):
            token = self(ids)[:, -1].argmax(-1, keepdim=True)
            each(i, token)
            ids = torch.cat([ids, token], dim=-1)
        return ids

    @torch.no_grad()
    def printed(self, ids: torch.Tensor, n: int) -> torch.Tensor:
        for i in range(n):
            token = self(ids)[:, -1].argmax(-1, keepdim=True)
            print(i, token.item())  # noqa: T201
            ids = torch.cat([ids, token], dim=-1)
        return ids


PROMPTS = [torch.tensor([[1, 2]]), torch.tensor([[3, 4]]), torch.tensor([[1, 5]])]


def writer(device: str) -> Writer:
    torch.manual_seed(0)
    return Writer().to(device)


def streamed(device: str) -> list[Any]:
    model, found = writer(device), []
    for prompt in PROMPTS:
        streamer = Collector()
        found += [model.generate(prompt.to(device), 4, streamer).tolist(), streamer.said]
    said: list[Any] = []
    for prompt in PROMPTS:
        each = lambda i, token: said.append((i, token.item()))  # noqa: E731
        found.append(model.told(prompt.to(device), 3, each=each).tolist())
    return [*found, said]


def test_a_streamer_gets_each_token_of_each_call():
    want = streamed("cpu")
    with tpuport.porting() as run:
        assert streamed("cuda") == want
    assert {one.what for one in run.report.descended} == {"Writer.generate", "Writer.told"}


def test_what_a_loop_prints_is_printed_in_each_call(capsys):
    model = writer("cpu")
    want = [model.printed(prompt, 4).tolist() for prompt in PROMPTS]
    text = capsys.readouterr().out
    with tpuport.porting():
        model = writer("cuda")
        assert [model.printed(prompt.cuda(), 4).tolist() for prompt in PROMPTS] == want
    assert capsys.readouterr().out == text


def test_without_a_streamer_it_is_one_program():
    want = [writer("cpu").generate(prompt, 4).tolist() for prompt in PROMPTS]
    with tpuport.porting() as run:
        model = writer("cuda")
        assert [model.generate(prompt.cuda(), 4).tolist() for prompt in PROMPTS] == want
    assert not run.report.descended
