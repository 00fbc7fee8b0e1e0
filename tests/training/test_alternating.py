"""Steps that take turns on one model: a GAN's, as eager PyTorch takes them."""

import copy
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tpuport
from tests.training.test_step import same
from tpuport.foundation.errors import UsageError
from tpuport.training import Checkpoints, alternating, from_torch, make_train_step


class Gan(torch.nn.Module):
    """A generator with buffers, and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.g = torch.nn.Sequential(
            # A bias before batch norm has no gradient but rounding, which Adam makes large.
            torch.nn.Linear(4, 16, bias=False),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Linear(16, 8),
        )
        self.d = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.LeakyReLU(0.2), torch.nn.Linear(16, 1)
        )


def d_loss(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    real, fake = model.d(batch["real"]), model.d(model.g(batch["z"]).detach())
    return F.softplus(-real).mean() + F.softplus(fake).mean(), {"real": real.mean()}


def g_loss(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    return F.softplus(-model.d(model.g(batch["z"]))).mean()


def given(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "real": torch.randn(12, 8, generator=generator) + 2,
            "z": torch.randn(12, 4, generator=generator),
        }
        for _ in range(count)
    ]


def optimizers(model: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return (
        torch.optim.Adam(model.d.parameters(), lr=2e-3, betas=(0.5, 0.99)),
        torch.optim.AdamW(model.g.parameters(), lr=1e-3, weight_decay=0.1),
    )


def eager(model: Any, batches: list[dict[str, torch.Tensor]]) -> Any:
    """The same by hand, as scripts have it."""
    model = copy.deepcopy(model)
    for_d, for_g = optimizers(model)
    for batch in batches:
        for_d.zero_grad()
        d_loss(model, batch)[0].backward()
        for_d.step()
        for_g.zero_grad()
        g_loss(model, batch).backward()
        for_g.step()
    return model


def steps(model: Any) -> dict[str, Any]:
    ported = tpuport.convert(model)
    for_d, for_g = optimizers(model)
    return {
        "d": make_train_step(ported, d_loss, from_torch(ported, for_d), trainable="d.**"),
        "g": make_train_step(ported, g_loss, from_torch(ported, for_g), trainable=["g.**"]),
    }


def test_ten_rounds_are_those_of_torch():
    model = Gan()
    expected = eager(model, given(10))
    step = alternating(**steps(model))
    state = step.init()
    for batch in given(10):
        state, metrics = step(state, batch)
    assert step.retraces == 0
    assert set(metrics) == {
        *("d/loss", "d/real", "d/grad_norm", "g/loss", "g/grad_norm", "loss", "skipped"),
    }
    np.testing.assert_allclose(metrics["loss"], metrics["d/loss"] + metrics["g/loss"], rtol=1e-6)
    assert int(state.step) == 10
    same(step.load_state(state).to_torch(), expected)


def test_states_take_turns_by_hand_too():
    model = Gan()
    expected = eager(model, given(4))
    found = steps(model)
    d, g = found["d"].init(), found["g"].init()
    assert all(name.startswith("d.") for name in d.params)
    for batch in given(4):
        d, _ = found["d"](d.with_weights_of(g), batch)
        g, _ = found["g"](g.with_weights_of(d), batch)
    same(found["g"].load_state(g).to_torch(), expected)


def test_noise_is_not_the_same_in_both():
    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def loss(model: Any, x: torch.Tensor) -> Any:
        noise = torch.rand(())
        return (model.a(x) + model.b(x)).sum() * 0 + noise, {"noise": noise}

    ported = tpuport.convert(Noisy())
    parts = {name: make_train_step(ported, loss, "sgd", trainable=f"{name}.**") for name in "ab"}
    step = alternating(**parts)
    _, metrics = step(step.init(), torch.ones(1, 1))
    assert float(metrics["a/noise"]) != float(metrics["b/noise"])


def test_its_state_is_saved_and_gone_on_with(tmp_path):
    step = alternating(**steps(Gan()))
    state = step.init()
    for batch in given(2):
        state, _ = step(state, batch)
    with Checkpoints(tmp_path) as saved:
        saved.save(state)
    with Checkpoints(tmp_path) as saved:
        found = saved.restore(step.init())
    assert found is not None
    last = given(3)[2]
    one, _ = step(state, last)
    other, _ = step(found.state, last)
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    jax.tree.map(np.testing.assert_array_equal, one.optimizer, other.optimizer)


def test_what_cannot_take_turns_is_refused():
    found = steps(Gan())
    with pytest.raises(UsageError, match=r"a and b both train 'd\.0\.bias'"):
        alternating(a=found["d"], b=found["d"])
    with pytest.raises(UsageError, match="g and d are of different ported models"):
        alternating(d=found["d"], g=steps(Gan())["g"])
    with pytest.raises(UsageError, match=r"pattern 'disc\.\*\*' matches no trainable parameter"):
        make_train_step(found["d"].ported, d_loss, trainable="disc.**")
    with pytest.raises(UsageError, match="expected steps by name"):
        alternating()


def test_causes_come_in_the_order_in_which_programs_were_compiled():
    step = alternating(**steps(Gan()))
    state, _ = step(step.init(), given(1)[0])
    known = len(step.causes)
    batch = {name: value[:6] for name, value in given(1)[0].items()}
    step.steps["d"](step._part(state, "d", state.step), batch)
    assert any("[12, 8] -> float32[6, 8]" in cause for cause in step.causes[known][:])
