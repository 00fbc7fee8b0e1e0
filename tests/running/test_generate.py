"""transformers' `generate` in a ported script: two programs, or the loop of transformers."""

from typing import Any

import pytest
import torch

import tpuport
from tpuport.generation import programs

transformers = pytest.importorskip("transformers")


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        pad_token_id=0, eos_token_id=5, bos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_generate_is_two_programs_and_follows_the_script() -> None:
    model, ids = llama(), torch.randint(6, 61, (2, 7))
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0

    def run(model: Any, device: str) -> list[torch.Tensor]:
        given = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        found = [model.generate(**given, max_new_tokens=n) for n in (9, 20, 1)]
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        found.append(model.generate(**given, max_new_tokens=9))
        model.generation_config.eos_token_id = int(found[-1][1, 9])
        found.append(model.generate(**given, max_new_tokens=9))
        return [one.cpu() for one in found]

    expected = run(llama(), "cpu")
    with tpuport.porting() as scope:
        given = run(model.cuda(), "cuda")
    assert all(map(torch.equal, given, expected))
    assert not torch.equal(expected[0], expected[3])
    (report,) = scope.report.programs
    assert report.verified
    # One more: the tokens that end a sequence are part of the loop.
    assert sum("new_token" not in c for r in report.retraces for c in r.causes) <= 2
    assert not scope.report.descended


def test_what_no_program_does_is_transformers_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(6, 61, (1, 4))
    beams = llama().generate(ids, max_new_tokens=2, num_beams=2)
    greedy = llama().generate(ids, max_new_tokens=2)
    with tpuport.porting(verify=False) as scope:
        model = llama().cuda()
        for _ in range(2):
            given = model.generate(ids.cuda(), max_new_tokens=2, num_beams=2)
            assert torch.equal(given.cpu(), beams)
        # It is tried again with other arguments.
        assert torch.equal(model.generate(ids.cuda(), max_new_tokens=2).cpu(), greedy)
    assert [one.what for one in scope.report.descended] == ["LlamaForCausalLM.generate"]
    assert "beam_search" in scope.report.descended[0].reason
    # Other tokens than eager's are never returned.
    choose = programs._Choice.__call__
    monkeypatch.setattr(
        programs._Choice, "__call__", lambda self, scores, *rest: choose(self, -scores, *rest)
    )
    with tpuport.porting() as scope:
        given = llama().cuda().generate(ids.cuda(), max_new_tokens=2)
    assert torch.equal(given.cpu(), greedy)
    assert "differs from eager" in scope.report.descended[0].reason


class Grown(torch.nn.Module):
    """Methods of a script that call the module with a longer tensor in each round."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x)) + x.mean(0, keepdim=True)

    @torch.no_grad()
    def extended(self, x: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            x = torch.cat([x, self(x)[-1:]])
        return x

    @torch.no_grad()
    def noted(self, x: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            self.seen.append(len(self.seen))  # each round reads the list
            x = torch.cat([x, self(x)[-1:]])
        return x


def test_a_method_that_makes_a_tensor_longer_is_one_program() -> None:
    torch.manual_seed(0)
    eager, x = Grown(), torch.randn(3, 4)
    expected = [eager.extended(x, n) for n in (6, 6, 7)]
    with tpuport.porting() as scope:
        model = Grown().cuda()
        model.load_state_dict(eager.state_dict())
        given = [model.extended(x.cuda(), n) for n in (6, 6, 7)]  # in a loop of the caller's, too
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    assert [len(report.retraces) for report in scope.report.programs] == [1]
    assert not scope.report.descended


def test_a_loop_that_is_no_program_runs_as_it_is_written() -> None:
    torch.manual_seed(0)
    eager, x = Grown(), torch.randn(3, 4)
    expected = eager.noted(x, 5)
    with tpuport.porting() as scope:
        model = Grown().cuda()
        model.load_state_dict(eager.state_dict())
        given = model.noted(x.cuda(), 5)
    torch.testing.assert_close(given.cpu(), expected)
    assert model.seen == eager.seen == [0, 1, 2, 3, 4]
    (one,) = scope.report.descended
    assert one.what == "Grown.noted"
    assert "for _ in range(n):" in one.reason
