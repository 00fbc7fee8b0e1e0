"""Objects outside of the port that the code replaces by copies, instead of changing them."""

import copy
from typing import Any

import jax
import pytest
import torch

import tpuport
from tpuport.foundation.errors import PortError

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class State:
    """What a registry knows, never changed in place."""

    def __init__(self, before: "State | None" = None) -> None:
        self.names = set(before.names) if before else {"torch"}
        self.scales = dict(before.scales) if before else {"torch": 2.0}
        self.found: list[Any] = list(before.found) if before else []

    def get(self, kind: type) -> tuple["State", float]:
        """Return the state with this kind in it, and the scale."""
        state = State(self)
        if not any(known is kind for known in state.found):
            state.found.append(kind)
        return state, state.scales["torch"]


class Registry:
    def __init__(self) -> None:
        self.state = State()

    def get(self, kind: type) -> float:
        self.state, scale = self.state.get(kind)
        return scale


REGISTRY = Registry()


def looked_up(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2) * REGISTRY.get(type(x))


def test_a_state_that_each_call_replaces_by_a_copy_is_as_before():
    ported = tpuport.convert(looked_up)
    for _ in range(2):
        torch.testing.assert_close(ported(X).torch(), looked_up(X))
    assert len(ported.report.retraces) == 0
    REGISTRY.state.scales["torch"] = 3.0
    torch.testing.assert_close(ported(X).torch(), looked_up(X))
    (got,) = jax.grad(lambda x: ported.apply({}, {}, None, *x)[0].sum())([jax.numpy.asarray(X)])
    torch.testing.assert_close(tpuport.to_torch(got), 6 * X)


class Marker:
    """An object that only `is` tells from others."""


class Named(Marker):
    def __init__(self) -> None:
        self.label = "same"


class Settings:
    def __init__(self, kind: type[Marker]) -> None:
        self.kind = kind
        self.default = self.current = kind()


SETTINGS = Settings(Marker)


def asks(x: torch.Tensor) -> torch.Tensor:
    label = getattr(SETTINGS.current, "label", "")
    return x * 2 if SETTINGS.current is SETTINGS.default else x * 3 + len(label)


@pytest.mark.parametrize("kind", [Marker, Named])
def test_a_copy_that_identity_tells_apart_is_another_object(kind: type[Marker]):
    global SETTINGS
    SETTINGS = Settings(kind)
    ported = tpuport.convert(asks)
    torch.testing.assert_close(ported(X).torch(), X * 2)
    SETTINGS.current = copy.copy(SETTINGS.current)
    torch.testing.assert_close(ported(X).torch(), asks(X))


def counts(x: torch.Tensor) -> torch.Tensor:
    REGISTRY.state = State(REGISTRY.state)
    REGISTRY.state.scales["torch"] += 1
    return x * REGISTRY.state.scales["torch"]


def test_a_copy_with_another_value_is_refused():
    with pytest.raises(PortError, match="TPU406 a call of counts writes to what is outside of it"):
        tpuport.convert(counts)(X)
