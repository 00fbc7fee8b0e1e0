"""Parameters whose gradient eager PyTorch leaves at None stay as they are, step by step."""

import copy
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tpuport
from tests.training.none_programs import batches, program
from tpuport.training import from_torch, make_train_step, value_and_grad

OPTIMIZERS: list[Any] = [
    lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.5),
    lambda p: torch.optim.SGD(p, 0.02, momentum=0.9, weight_decay=0.1),
    lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.1),
    lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    lambda p: torch.optim.NAdam(p, 0.02, weight_decay=0.1),
]


def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).tanh().square().mean()


def trained_by_eager(model: Any, optimizer: Any, x: torch.Tensor, parts: int, clip: Any) -> None:
    optimizer.zero_grad()
    for part in x.chunk(parts):
        (loss(model, part) / parts).backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


@pytest.mark.parametrize("seed", range(9))
def test_steps_of_programs(seed: int):
    module = program(seed)
    eager = copy.deepcopy(module)
    make, parts = OPTIMIZERS[seed % 4 if seed < 8 else 4], 1 + seed % 2
    clip = 0.1 if seed % 3 == 0 else None
    ported = tpuport.convert(module, verify=False)
    step = make_train_step(
        *(ported, loss, from_torch(ported, make(module.parameters()))),
        accumulate=parts,
        clip_norm=clip,
    )
    theirs, state = make(eager.parameters()), step.init()
    for number, x in enumerate(batches()):
        state, _ = step(state, x)
        trained_by_eager(eager, theirs, x, parts, clip)
        for name, value in eager.named_parameters():
            got = state.params.get(name, state.frozen.get(name))
            where = f"{name} after step {number}"
            np.testing.assert_allclose(
                got, value.detach().numpy(), rtol=1e-3, atol=2e-5, err_msg=where
            )


def test_flags_for_loops_of_your_own():
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.never, self.up = (torch.nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.always(x)
            if x.sum() > 0:
                y = y + self.up(x)
            return loss(torch.nn.Identity(), y)

    ported = tpuport.convert(Mixed())
    run = jax.jit(value_and_grad(lambda p, x: (ported.apply(p, {}, None, x)[0], None)))
    for sign in (1, -1):
        (_, aux), grads, has_gradient = run(ported.params, sign * np.ones((2, 3), np.float32))
        assert aux is None
        found = {name: bool(has_gradient[f"{name}.bias"]) for name in ("always", "never", "up")}
        assert found == {"always": True, "never": False, "up": sign > 0}
        assert not np.any(grads["never.weight"])


@pytest.mark.parametrize("seed", range(100, 104))
def test_gradients_under_porting(seed: int):
    module = program(seed)
    eager = copy.deepcopy(module)
    with tpuport.porting():
        for x in batches()[:3]:
            module.zero_grad()
            eager.zero_grad()
            loss(module, x).backward()
            loss(eager, x).backward()
            for (name, ours), theirs in zip(
                module.named_parameters(), eager.parameters(), strict=True
            ):
                assert (ours.grad is None) == (theirs.grad is None), name
                if theirs.grad is not None:
                    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("seed", range(200, 204))
def test_verify_compares_none_with_none(seed: int):
    ported = tpuport.convert(program(seed))
    for x in batches()[:3]:
        assert ported.verify(x).ok


def test_second_derivatives_are_none_where_eagers_are():
    def penalty(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
        return slope.square().sum()

    class Two(torch.nn.Module):
        """Two outputs, of which the penalty uses one; the last bias has no influence on slopes."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (torch.nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.first(x).tanh()
            return self.second(y), self.third(y)

    eager = Two()
    with tpuport.porting():
        module = copy.deepcopy(eager)
        for model in (module, eager):
            penalty(model, torch.ones(2, 3)).backward()
    for (name, ours), theirs in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    assert [p.grad is None for p in eager.parameters()] == [False, False, False, True, True, True]
