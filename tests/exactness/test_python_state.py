"""Python state that `forward` changes: numbers, flags, lists, activations.

And the way back to torch.
"""

import copy
import functools
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm as old_spectral_norm

import tpuport
from tests.exactness.plain_torchax import PlainTorchax
from tests.exactness.scenario import assert_same, by_tpuport, expect_torchax_wrong, normal
from tpuport.foundation.errors import PortError


class Counted(nn.Module):
    """A Python number that counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return x * self.weight / self.step


class Alternating(nn.Module):
    """A Python flag that every call turns over."""

    def __init__(self) -> None:
        super().__init__()
        self.flipped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.flipped = not self.flipped
        return x.flip(0) if self.flipped else x * 2


class Recording(nn.Module):
    """A list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(x.mean())
        return x * len(self.history)


class Remembering(nn.Module):
    """An activation kept on the module, replaced at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None
        self.info: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x * 2 if self.last is None else x + self.last
        self.last = x.detach() * 3
        self.info["shape"] = tuple(x.shape)
        self.info["top"] = x.amax(0)
        return out


def _check_many(build: Any, calls: int) -> Any:
    eager, ported = build(), by_tpuport(build())
    for seed in range(calls):
        x = normal(4, 3, seed=seed)
        assert_same(ported(x), eager(x), f"call {seed}")
    return eager, ported


def test_python_counter_counts_and_stops_compiling():
    eager, ported = _check_many(Counted, 8)
    assert int(ported.to_torch().step) == eager.step == 8
    assert len(ported.report.retraces) <= 3


@expect_torchax_wrong("a Python counter counts compilations, not calls")
def test_python_counter_under_plain_torchax():
    eager, ported = Counted(), PlainTorchax(Counted())
    for seed in range(3):
        x = normal(4, 3, seed=seed)
        assert_same(ported(x), eager(x), f"call {seed}")


def test_python_flag_that_alternates():
    _check_many(Alternating, 6)


def test_python_list_that_grows_is_refused():
    ported = by_tpuport(Recording())
    message = r"'history'.*changes on every call(.|\n)*What to do: register it as a buffer"
    with pytest.raises(PortError, match=message) as error:
        _ = [ported(normal(4, 3, seed=seed)) for seed in range(8)]
    assert "self.history.append(" in (error.value.source_line or "")


def test_python_attribute_holds_a_value_and_no_tracer():
    eager, ported = _check_many(Remembering, 4)
    plain = ported.to_torch()
    assert_same(plain.last, eager.last, "last")
    assert plain.info["shape"] == (4, 3)
    assert_same(plain.info["top"], eager.info["top"], "top")
    assert len(ported.report.retraces) == 1


@expect_torchax_wrong("a tracer stays on the module")
def test_python_attribute_under_plain_torchax():
    model = Remembering()
    ported = PlainTorchax(model)
    for seed in range(2):
        ported(normal(4, 3, seed=seed))
    assert not isinstance(model.last.jax(), jax.core.Tracer)


def test_state_returns_to_torch():
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), old_spectral_norm(nn.Linear(4, 2)))
    ported = tpuport.convert(copy.deepcopy(eager))
    for seed in range(3):
        x = normal(5, 3, seed=seed)
        eager(x), ported(x)
    plain = ported.to_torch()
    assert type(plain[1]) is nn.BatchNorm1d
    for name, value in eager.state_dict().items():
        assert_same(plain.state_dict()[name], value, name, 1e-4, 1e-6)
        assert plain.state_dict()[name].dtype == value.dtype


def test_state_of_apply_is_explicit():
    """`apply` reads the buffers that it is given, gives the new ones back, and keeps nothing."""
    ported = by_tpuport(nn.BatchNorm1d(3))
    before = dict(ported.buffers)
    x = normal(5, 3)
    _, once = ported.apply(ported.params, before, None, x)
    _, again = ported.apply(ported.params, before, None, x)
    _, twice = jax.jit(ported.apply)(ported.params, once, None, x.numpy())
    assert ported.buffers == before
    assert_same(once["running_mean"], again["running_mean"], "the same from the same")
    assert int(twice["num_batches_tracked"]) == 2


class Exchanging(nn.Module):
    def __init__(self, requires_grad: bool) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Parameter(torch.full((2,), value), requires_grad) for value in (1.0, 2.0)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a, self.b = self.b, self.a
        return x * self.a


def test_trained_parameters_that_change_names_are_refused():
    with pytest.raises(PortError, match="gives 'a' the tensor that 'b' was"):
        tpuport.convert(Exchanging(True))(torch.ones(2))
    ported, eager, x = tpuport.convert(Exchanging(False)), Exchanging(False), torch.ones(2)
    for _ in range(3):
        assert ported(x).tolist() == eager(x).tolist()


class Doubled:
    """Stands for a submodule's `forward` during a call."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * 2


class Wraps(nn.Module):
    """Puts something for a submodule's `forward`, and leaves what refers to that submodule."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind, self.kept = nn.Linear(3, 3), kind, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.kept or self.inner.forward
        wrapped = Doubled(before) if self.kind != "partial" else functools.partial(before)
        self.inner.forward = wrapped  # type: ignore[method-assign]
        try:
            return self.inner(x)
        finally:
            inner = self.inner
            if self.kind == "function" and self.kept is None:
                self.kept = lambda x: inner.weight.sum() + type(inner).forward(inner, x)
            if self.kind == "method":
                inner.forward = before
            else:
                del inner.forward
            if self.kind == "partial" and self.kept is None:
                self.kept = functools.partial(type(inner).forward, inner)


@pytest.mark.parametrize("kind", ["method", "function", "partial"])
def test_an_attribute_that_refers_to_a_method_of_a_submodule(kind: str):
    eager = Wraps(kind)
    port = by_tpuport(copy.deepcopy(eager))
    for seed in range(3):
        x = normal(2, 3, seed=seed)
        assert_same(port(x), eager(x), f"call {seed}")
    # What was left refers to the weights of now, not to those of the first trace.
    with torch.no_grad():
        eager.inner.weight.mul_(3)
    port.params["inner.weight"] = port.params["inner.weight"] * 3
    for seed in range(2):
        x = normal(2, 3, seed=5 + seed)
        assert_same(port(x), eager(x), f"call {seed} with other weights")
