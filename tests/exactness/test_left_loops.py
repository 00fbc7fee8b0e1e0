"""Loops that a traced value ends by `break`, whose names are bound by rounds or are one tensor."""

from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients, normal
from tpuport.foundation.errors import PortError


class Solvers(nn.Module):
    """Iterations to a fixed point; `names` are the methods that it calls."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names, self.layer = names, nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        """Return what the methods give."""
        return [getattr(self, name)(x) for name in self.names]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) * 0.5 + 0.1)

    def endless(self, x: torch.Tensor) -> Any:
        count = 0
        while True:
            z = self.step(x)
            count += 1
            if (z - x).abs().max() < 0.05:
                break
            if count >= 20:
                break
            x = z
        return z, count

    def skipping(self, x: torch.Tensor) -> Any:
        count, total = 0, x * 0
        while count < 15:
            count += 1
            x = torch.tanh(self.layer(x) + 0.01 * count)
            if x.sum() > 0:
                continue
            total = total + x
            if total.abs().max() > 2:
                break
        return total, x, count

    def nested(self, x: torch.Tensor) -> Any:
        rounds = 0
        while True:
            inner = 0
            while True:
                x = self.step(x)
                inner += 1
                if x.sum() > 0.2 or inner > 4:
                    break
            rounds += inner
            x = x - 0.3
            if rounds > 10:
                break
        return x, rounds, inner

    def known_at_first(self, x: torch.Tensor) -> Any:
        error, count = 1e9, 0
        while error > 1e-2 and count < 20:
            z = self.step(x)
            count += 1
            error = (z - x).abs().max().item()
            x = z
        return z, count

    def over_a_range(self, x: torch.Tensor) -> Any:
        y = x
        for count in range(30):  # noqa: B007 - it is read after the loop
            z = self.step(y)
            if (z - y).abs().max() < 1e-2:
                break
            y = z
        return z, y, count

    def swapped(self, x: torch.Tensor) -> Any:
        a, b = x * 1, x * 2
        for _ in range(14):
            a, b = b, torch.tanh(a + self.layer(b) * 0.1)
            if b.sum() > 1:
                break
        return a, b

    def with_the_one_before(self, x: torch.Tensor) -> Any:
        first = a = before = x * 1
        for _ in range(14):
            before = a
            a = self.step(a)
            if a.sum() > 0.5:
                break
        return a, before, first

    def accelerated(self, x: torch.Tensor) -> Any:
        before, y, t = x * 1, x * 1, 1.0
        for _ in range(15):
            z = self.step(y)
            following = (1 + (1 + 4 * t * t) ** 0.5) / 2
            y = z + (t - 1) / following * (z - before)
            if (z - before).norm() < 1e-2:
                break
            before, t = z, following
        else:
            y = y + 100
        return z, before, y

    def one_after_another(self, x: torch.Tensor) -> Any:
        for _ in range(13):
            y = self.step(x)
            error = (y - x).abs().max()
            if error < 0.02:
                break
            x = y
        for _ in range(13):
            w = torch.sin(y + self.layer(x))
            if w.sum() < error:
                break
            y = w
        return w, y

    def returning(self, x: torch.Tensor) -> Any:
        for count in range(20):
            z = self.step(x)
            if (z - x).abs().max() < 0.05:
                return z, count
            if z.sum() > 5:
                return x * 2, -count
            x = z
        return x, 100

    def returning_at_last(self, x: torch.Tensor) -> Any:
        while True:
            z = self.step(x)
            if (z - x).abs().max() < 0.05:
                return z
            x = z

    def raising(self, x: torch.Tensor) -> Any:
        for _ in range(30):
            z = self.step(x)
            if (z - x).abs().max() < 0.05:
                return z
            x = z
        raise RuntimeError("no convergence")

    def with_else(self, x: torch.Tensor) -> Any:
        count = 0
        while count < 16:
            x = torch.tanh(self.layer(x))
            count += 1
            if x.norm() < 0.9:
                break
        else:
            x = x * 0
        return x, count

    def bound_by_some(self, x: torch.Tensor) -> Any:
        for count in range(15):
            x = self.step(x)
            if self.names == ("bound_by_some",):
                y = x
            if count > 0 or self.names == ():
                w = z * 2  # noqa: F821 - it is bound by the round before
            else:
                w = x
            z = self.step(w)
            if z.sum() > 0.5:
                return (
                    z +
                    w
                )  # fmt: skip
        return y if self.names == ("bound_by_some",) else x


FORMS = (
    ("endless", "skipping", "nested"),
    ("known_at_first", "over_a_range", "swapped", "with_the_one_before"),
    ("accelerated", "one_after_another"),
    ("with_else", "returning", "returning_at_last", "raising", "bound_by_some"),
)
CALLS = tuple(
    (normal(4, 3, seed=seed) * scale + shift,)
    for seed, scale, shift in ((1, 1.0, 0.0), (2, 0.3, 0.5), (3, 1.0, -1.0), (4, 0.01, 0.0))
)


@pytest.mark.parametrize("names", FORMS, ids=["while", "range", "more", "returns"])
def test_they_are_as_in_eager_pytorch(names: tuple[str, ...]) -> None:
    scenario = Scenario("loops", lambda: Solvers(names), CALLS)
    check_calls(scenario, by_tpuport)
    check_gradients(Scenario("loops", lambda: Solvers(names), CALLS[:1]), by_tpuport)


class Halving(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while x.abs().max() > 0.3:
            y = x * 0.5
            x = y - 0.01
        return y


def test_the_error_after_a_loop_that_does_not_return() -> None:
    torch.manual_seed(0)
    module, x = Solvers(("raising",)), CALLS[0][0]
    ported = tpuport.convert(module)
    torch.testing.assert_close(tpuport.to_torch(ported(x)[0]), module(x)[0])
    for one in (module, ported):
        with pytest.raises(RuntimeError, match="no convergence"):
            one(torch.full((4, 3), float("nan")))


def test_a_loop_without_a_round_binds_nothing() -> None:
    ported = tpuport.convert(Halving())
    x = torch.tensor([2.0, -1.0])
    assert torch.equal(tpuport.to_torch(ported(x)), Halving()(x))
    for module in (Halving(), ported):
        with pytest.raises(UnboundLocalError, match="cannot access"):
            module(x / 100)


class Written(nn.Module):
    """Loops whose results are what another name holds in some of their rounds only."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        return getattr(self, self.name)(x * 1, x * 2, n)

    def after(self, a: torch.Tensor, b: torch.Tensor, n: torch.Tensor) -> Any:
        rounds = 0
        while True:
            b = a
            a = torch.tanh(a)
            rounds += 1
            if a.sum() < n or rounds > 9:
                break
        b.add_(5)
        return a, b

    def after_a_branch(self, a: torch.Tensor, b: torch.Tensor, n: torch.Tensor) -> Any:
        first, i = b, torch.zeros(())
        while i < n:
            if a.sum() > 3:
                b = b * 0.5
            i = i + 1
        b.add_(1.0)
        return first, b

    def by_a_later_round(self, a: torch.Tensor, b: torch.Tensor, n: torch.Tensor) -> Any:
        first = b
        for _ in range(40):
            a.mul_(0.9)
            a = b
            b = torch.tanh(b)
            if b.sum() < n:
                break
        return a, b, first


@pytest.mark.parametrize("name", ["after", "after_a_branch", "by_a_later_round"])
def test_a_write_to_what_may_be_another_name_is_refused(name: str) -> None:
    with pytest.raises(PortError) as caught:
        tpuport.convert(Written(name), verify=False)(torch.ones(2), torch.tensor(1.0))
    assert caught.value.code == "TPU101"


class OnlyTests(nn.Module):
    """A layer that decides how often loops run, and gives what they compute no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.judge, self.layer = nn.Linear(3, 1), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = 1.0
        while self.judge(x - size).square().sum() > 1 and size > 1e-2:
            size *= 0.5
        for _ in range(20):
            x = torch.tanh(self.layer(x)) * size
            if self.judge(x).sum() > 0.1:
                break
        return x


def test_a_layer_that_only_tests_of_loops_read_has_no_gradient() -> None:
    def gradients(device: str) -> list[torch.Tensor | None]:
        net = OnlyTests().to(device)
        net(torch.linspace(-2, 2, 6, device=device).reshape(2, 3)).sum().backward()
        return [None if p.grad is None else p.grad.cpu() for p in net.parameters()]

    wanted = gradients("cpu")
    assert [one is None for one in wanted] == [True, True, False, False]
    with tpuport.porting(verify=False):  # a comparison would see it
        torch.testing.assert_close(gradients("cuda"), wanted)
