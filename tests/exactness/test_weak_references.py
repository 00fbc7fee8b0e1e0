"""Modules that refer weakly to their parent, to a sibling or to what an object of theirs holds."""

import weakref
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tpuport
from tests.exactness.scenario import normal

X = normal(2, 3)


class _Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.linear, self.parent = nn.Linear(3, 3), weakref.ref(parent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parent: Any = self.parent()
        parent.calls += 1
        return self.linear(x) * parent.scale + parent.shift


class Parent(nn.Module):
    """Its child reads its weights, and counts in it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scale = 0, nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("shift", torch.zeros(3))
        self.child = _Child(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shift += 1
        return self.child(x)


class _Reader(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = weakref.ref(other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other: Any = self.other()
        return x @ other.weight


class Siblings(nn.Module):
    """The first part refers to the second one."""

    def __init__(self) -> None:
        super().__init__()
        later = nn.Linear(3, 3)
        self.first, self.later = _Reader(later), later

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.later(x)


class _Strategy:
    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.weights, self.optimizer = weights, _Optimizer(self)


class _Optimizer:
    def __init__(self, strategy: _Strategy) -> None:
        self.strategy = weakref.proxy(strategy)


class Proxied(nn.Module):
    """Reaches a weight through an object of its own, by a proxy of another one, as Lightning's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.strategy = _Strategy([self.linear.weight])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.strategy.optimizer.strategy.weights[0]


@pytest.mark.parametrize("build", [Parent, Siblings, Proxied])
def test_convert_follows_weak_references(build: type[nn.Module]):
    torch.manual_seed(0)
    eager = build()
    torch.manual_seed(0)
    ported = tpuport.convert(build())
    for _ in range(3):
        assert torch.allclose(tpuport.to_torch(ported(X)), eager(X))
    # The weights that it reads are those of `apply`.
    for weight in eager.parameters():
        weight.data *= 3
    tripled = {name: 3 * value for name, value in ported.params.items()}
    out, _ = ported.apply(tripled, ported.buffers, None, X)
    assert torch.allclose(tpuport.to_torch(out), eager(X))


@pytest.mark.parametrize("build", [Parent, Siblings, Proxied])
def test_a_script_trains_modules_with_weak_references(build: type[nn.Module]):
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = build().to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(X.to(device)).square().mean().backward()
            optimizer.step()
        return [torch.tensor(getattr(model, "calls", 0)), *map(_host, model.parameters())]

    expected = trained("cpu")
    with tpuport.porting():
        found = trained("cuda")
    # XLA sums in another order, in three steps.
    assert all(torch.allclose(a, b, 1e-5, 1e-6) for a, b in zip(found, expected, strict=True))


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


class _Wrapping(torch.optim.SGD):
    """An optimizer around another one that never ran its class's `__init__`, as Lightning's."""

    def __init__(self, inner: torch.optim.SGD) -> None:
        vars(self).update(vars(inner))
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_a_copy_of_an_optimizer_leaves_its_class_as_it_is():
    class Trained(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.trainer["optimizer"].param_groups[0]["lr"]

    calls: list[str] = []
    handle = register_optimizer_step_pre_hook(lambda one, *_: calls.append(type(one).__name__))
    try:
        with tpuport.porting():
            model = Trained(3, 3).cuda()
            optimizer = _Wrapping(torch.optim.SGD(model.parameters(), 0.5))
            model.trainer = {"optimizer": optimizer}
            expected = nn.functional.linear(X, _host(model.weight), _host(model.bias)) * 0.5
            found = model(X.cuda())
            assert torch.allclose(_host(found), expected)
            found.sum().backward()
            optimizer.step()
    finally:
        handle.remove()
    assert calls == ["SGD"]


class Store:
    """Values that refer weakly to the record that they are in, as torch_geometric's do."""

    def __init__(self, record: Any, x: torch.Tensor) -> None:
        self._parent, self.x = weakref.ref(record), x

    def scaled(self) -> torch.Tensor:
        record: Any = self._parent()
        return self.x * record.scale


class Record:
    def __init__(self, scale: torch.Tensor, x: torch.Tensor) -> None:
        self.scale = scale
        self.parts = {"x": Store(self, x)}


class _Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, record: Record) -> tuple[torch.Tensor, Record]:
        store: Any = record.parts["x"]
        assert store._parent() is record
        out = self.linear(store.scaled())
        record.scale = record.scale + 1
        return out, Record(record.scale * 2, out)


def test_parts_of_an_argument_refer_to_what_they_are_in():
    torch.manual_seed(0)
    model = _Reading()
    ported = tpuport.convert(model)
    for number in range(3):
        x, scale = normal(4, 3, seed=number), normal(3, seed=number + 5)
        ours, theirs = Record(scale.clone(), x.clone()), Record(scale.clone(), x.clone())
        (out, made), (want, other) = ported(ours), model(theirs)
        torch.testing.assert_close(tpuport.to_torch(out), want)
        torch.testing.assert_close(tpuport.to_torch(ours.scale), theirs.scale)
        assert made.parts["x"]._parent() is made
        assert ours.parts["x"]._parent() is ours
        torch.testing.assert_close(tpuport.to_torch(made.scale), other.scale)
    assert not ported.report.retraces

    def loss(scale: jax.Array, x: jax.Array) -> jax.Array:
        return ported.apply(ported.params, ported.buffers, None, Record(scale, x))[0][0].sum()

    x, scale = normal(4, 3).requires_grad_(), normal(3, seed=5).requires_grad_()
    model(Record(scale, x))[0].sum().backward()
    found = jax.jit(jax.grad(loss, (0, 1)))(*(tpuport.to_numpy(t.detach()) for t in (scale, x)))
    for ours, tensor in zip(found, (scale, x), strict=True):
        torch.testing.assert_close(tpuport.to_torch(ours), tensor.grad)
