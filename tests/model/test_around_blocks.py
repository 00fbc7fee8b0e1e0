"""State of modules around a block, and of helpers behind decorators: each block sees its own."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tests.model.repeated import Block, Stack, port, records, x_of

TABLE: dict[str, Any] = {"scale": 1.0}
# The last block sees what the first one saw, and so does the one in the middle.
VALUES = [1.0, 0.5, 1.0, 2.0, 1.0]


class Setting(Stack):
    """Does something before each of its blocks."""

    def __init__(self, make: Callable[[int], nn.Module], act: Callable[..., None]) -> None:
        super().__init__(make, len(VALUES))
        self.act = act

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        try:
            for value, block in zip(VALUES, self.blocks, strict=True):
                self.act(self, value)
                x = block(x)
        finally:
            self.act(self, 1.0)
        return self.head(x)


# -- modules around the block ----------------------------------------------------------------------


class Switch(nn.Module):
    """Gives a number, and no operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.flag, self.count = 1.0, 0

    def forward(self) -> float:
        return self.flag

    def counted(self) -> int:
        self.count += 1
        return 1 + self.count % 2


READS: dict[str, Callable[[Any], float]] = {
    "by name": lambda parent: parent.child.flag,
    "by string": lambda parent: getattr(parent, "child").flag,  # noqa: B009
    "in a list": lambda parent: parent.switches[0].flag,
    "called": lambda parent: parent.child(),
    "submodule": lambda parent: parent.get_submodule("switches.0").flag,
    "one of all": lambda parent: next(m for m in parent.modules() if isinstance(m, Switch)).flag,
    "deep": lambda parent: parent.deep[1][0].flag,
}


class Knows(Block):
    """Knows the model that it is in."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.owners: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * READS[self.how](self.owners[0])


def set_switches(parent: Any, value: float) -> None:
    for one in (parent.child, parent.switches[0], parent.deep[1][0]):
        one.flag = value


class Around(Setting):
    def __init__(self, make: Callable[[int], nn.Module], act: Callable[..., None]) -> None:
        super().__init__(make, act)
        self.child = Switch()
        self.switches = nn.ModuleList([Switch()])
        self.deep = nn.Sequential(nn.Identity(), nn.Sequential(Switch()))
        for block in self.blocks:
            object.__setattr__(block, "owners", [self])


@pytest.mark.parametrize("how", READS)
def test_an_attribute_of_a_module_in_the_model_around(how: str):
    assert port(Around(lambda i: Knows(how), set_switches)).traced == 3


class Asks(Knows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Block.forward(self, x) * self.owners[0].child.counted()


def test_a_counter_of_a_module_in_the_model_around():
    ported, model = (Around(lambda i: Asks(""), lambda parent, value: None) for _ in range(2))
    ported = tpuport.convert(ported, blocks="scan", verify=False)
    got = tpuport.to_torch(ported(x_of()))
    torch.testing.assert_close(got, model(x_of()).detach(), rtol=1e-4, atol=1e-4)
    (record,) = records(ported)
    assert record.reason == (
        "blocks.0: it changes Python state outside of its modules: `count` of a Switch"
    )


class AsksForBuffer(Knows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Block.forward(self, x) * (1 if self.owners[0].child.seen is None else 2)


def set_buffer(parent: Any, value: float) -> None:
    parent.child.register_buffer("seen", None if value == 1.0 else torch.ones(1), persistent=False)


def test_a_buffer_of_a_module_in_the_model_around_that_is_none():
    model = Around(lambda i: AsksForBuffer(""), set_buffer)
    model.child.register_buffer("seen", None)
    record = port(model)
    assert (record.traced, record.changed) == (2, "`seen` of a dict")


# -- helpers behind decorators ---------------------------------------------------------------------


def traced_by(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        return function(*args)

    return wrapped


def scale_of(*args: Any) -> float:
    return TABLE["scale"]


@contextlib.contextmanager
def scaled() -> Iterator[float]:
    yield TABLE["scale"]


def in_context() -> float:
    with scaled() as scale:
        return scale


class Scaling(contextlib.ContextDecorator):
    def __enter__(self) -> "Scaling":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class Methods:
    @functools.singledispatchmethod
    def one(self, value: Any) -> float:
        return scale_of()

    two = functools.partialmethod(scale_of, 2)


HELPERS: dict[str, Callable[..., float]] = {
    "wraps": traced_by(scale_of),
    "no_grad": torch.no_grad()(lambda: TABLE["scale"]),
    "no_grad twice": traced_by(torch.no_grad()(torch.enable_grad()(lambda: TABLE["scale"]))),
    "inference": torch.inference_mode()(lambda: TABLE["scale"]),
    "context manager": in_context,
    "decorator": Scaling()(lambda: TABLE["scale"]),
    "single dispatch": lambda: functools.singledispatch(scale_of)(1),
    "method of dispatch": lambda: Methods().one(1),
    "partial method": lambda: Methods().two(),
}
no_grad = HELPERS["no_grad"]
nested = HELPERS["no_grad twice"]
dispatched = functools.singledispatch(scale_of)
decorated = HELPERS["decorator"]
inferring = HELPERS["inference"]
wrapped = HELPERS["wraps"]
cached = functools.lru_cache(lambda key: TABLE["scale"])


class ByWraps(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * wrapped()


class ByNoGrad(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * no_grad()


class ByNested(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * nested()


class ByInference(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * inferring()


class ByManager(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with scaled() as scale:
            return super().forward(x) * scale


class ByDecorator(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * decorated()


class ByDispatch(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * dispatched(1)


class ByMethods(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * Methods().one(1)


class ByPartialMethod(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * Methods().two()


class ByCache(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * cached(1)


class Itself(Block):
    """Its `forward` is decorated by torch."""

    @torch.no_grad()
    def scale(self) -> float:
        return TABLE["scale"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale()


def set_table(parent: Any, value: float) -> None:
    TABLE["scale"] = value
    cached.cache_clear()


DECORATED = [ByWraps, ByNoGrad, ByNested, ByInference, ByManager, ByDecorator, ByDispatch]
DECORATED += [ByMethods, ByPartialMethod, ByCache, Itself]


@pytest.mark.parametrize("kind", DECORATED)
def test_state_behind_a_decorator(kind: Any):
    assert port(Setting(lambda i: kind(), set_table)).traced == 3


# -- the environment, and methods that are swapped -------------------------------------------------


class ByEnvironment(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(os.environ.get("SCALE_OF_BLOCKS", "1"))


class ByGetenv(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(os.getenv("SCALE_OF_BLOCKS") or 1)


@pytest.mark.parametrize("kind", [ByEnvironment, ByGetenv])
def test_the_environment(kind: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCALE_OF_BLOCKS", "1")

    def set_environment(parent: Any, value: float) -> None:
        os.environ["SCALE_OF_BLOCKS"] = str(value)

    assert port(Setting(lambda i: kind(), set_environment)).traced == 3


class Swapped(Block):
    def scale(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Block.forward(self, x) * self.scale()


def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return Block.forward(self, x) * 2


def halved(self: Any, x: torch.Tensor) -> torch.Tensor:
    return Block.forward(self, x) / 2


FORWARD, SCALE, LINEAR = Swapped.forward, Swapped.scale, nn.Linear.forward


def swap_forward(parent: Any, value: float) -> None:
    Swapped.forward = {1.0: FORWARD, 2.0: doubled, 0.5: halved}[value]  # pyright: ignore


def swap_helper(parent: Any, value: float) -> None:
    Swapped.scale = SCALE if value == 1.0 else lambda self: value


def swap_torch(parent: Any, value: float) -> None:
    nn.Linear.forward = LINEAR if value == 1.0 else lambda self, x: LINEAR(self, x) * value  # pyright: ignore


@pytest.mark.parametrize("act", [swap_forward, swap_helper, swap_torch])
def test_a_method_that_is_swapped_on_its_class(act: Any):
    assert port(Setting(lambda i: Swapped(), act)).traced == 3
