"""Containers and objects as trees: flattened, cloned, restored, by one protocol."""

from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation import pytree
from tpuport.foundation.pytree.clone import clone_module
from tpuport.foundation.pytree.compare import same_value
from tpuport.foundation.pytree.snapshot import Snapshot


class Boxes(list[Any]):
    """A list with an attribute."""

    scale = 1


class Pair(NamedTuple):
    first: Any
    second: Any


class Doubled(Pair):
    """A named tuple whose class takes other arguments than its fields."""

    def __new__(cls, value: Any) -> "Doubled":
        return super().__new__(cls, value, value)


class Private:
    __slots__ = ("__hidden",)

    def __init__(self, hidden: Any) -> None:
        self.__hidden = hidden

    def read(self) -> Any:
        return self.__hidden


@dataclass
class Cache:
    keys: Any
    seen: int = 0


def boxes(tensor: torch.Tensor) -> Boxes:
    made = Boxes([tensor])
    made.scale = 2
    return made


MAKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda t: [t, 1],
    "list with an attribute": boxes,
    "tuple": lambda t: (t, "a"),
    "named tuple": lambda t: Pair(t, 2),
    "named tuple of its own": Doubled,
    "dict": lambda t: {"a": t, 3: None},
    "ordered": lambda t: OrderedDict(a=t),
    "default": lambda t: defaultdict(list, a=[t]),
    "user dict": lambda t: UserDict(a=t),
    "deque": lambda t: deque([t], maxlen=3),
    "set": lambda t: {t},
    "frozenset": lambda t: frozenset({t}),
    "dataclass": Cache,
    "private slots": Private,
}


def first_tensor(value: Any) -> torch.Tensor:
    return next(v for v in pytree.flatten(value)[0] if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("name", MAKERS)
def test_a_structure_is_rebuilt_around_other_leaves(name: str):
    tensor, other = torch.zeros(2), torch.ones(2)
    value = MAKERS[name](tensor)
    leaves, spec = pytree.flatten(value)
    assert [leaf is tensor for leaf in leaves] == [True]
    made = pytree.unflatten(spec, [other])
    assert type(made) is type(value)
    assert first_tensor(made) is other
    assert pytree.flatten(made)[1].key == spec.key
    assert getattr(made, "scale", None) == getattr(value, "scale", None)
    assert getattr(made, "maxlen", None) == getattr(value, "maxlen", None)


@pytest.mark.parametrize("name", MAKERS)
def test_a_clone_shares_no_container_and_no_tensor(name: str):
    module = nn.Module()
    tensor = torch.zeros(2)
    module.held = MAKERS[name](tensor)
    made, known = clone_module(module, torch.clone)
    assert made.held is not module.held
    assert type(made.held) is type(module.held)
    assert first_tensor(made.held) is known[id(tensor)]
    assert first_tensor(module.held) is tensor


class Local(nn.Module):
    """Its forward runs functions that refer to its parts, as minGPT's blocks do."""

    def __init__(self, kind: str):
        super().__init__()
        part = self.part = nn.Linear(2, 2)
        parts, outer, scale = [part], self.scaled, torch.ones(1)
        self.register_buffer("scale", scale)

        def again(x: torch.Tensor, times: int = 2) -> torch.Tensor:
            return again(part(x), times - 1) if times else x

        first = partial(lambda of, x: of(x), part)
        inner = lambda x: part(x)  # noqa: E731
        self.run: Any = {
            "module": lambda x: part(x),
            "list": lambda x: parts[0](x),
            "method": lambda x: outer(x),
            "recursive": again,
            "partial": lambda x: first(x),
            "function": lambda x: inner(x) * scale,
        }[kind]

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.run(x)


@pytest.mark.parametrize("kind", ["module", "list", "method", "recursive", "partial", "function"])
def test_a_clone_runs_its_own_parts_in_local_functions(kind: str):
    module, x = Local(kind), torch.randn(3, 2)
    made, _ = clone_module(module, lambda t: t.detach().mul(2).requires_grad_(t.requires_grad))
    want = Local(kind)
    want.load_state_dict({name: t * 2 for name, t in module.state_dict().items()})
    assert torch.equal(made(x), want(x))
    again, _ = clone_module(made, torch.clone)
    assert torch.equal(again(x), want(x)), "a copy of a copy"


def test_local_functions_get_gradients():
    torch.manual_seed(0)
    module, x = Local("module"), torch.randn(3, 2)
    ported = tpuport.convert(module)

    def loss(params: Any) -> Any:
        return (ported.apply(params, ported.buffers, jax.random.key(0), x)[0] ** 2).mean()

    got = jax.jit(jax.grad(loss))(ported.params)
    module(x).square().mean().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert np.abs(got[name] - parameter.grad.numpy()).max() < 1e-6


class Holding(nn.Module):
    """Keeps the parameters of its parts in an attribute too, as policies keep an optimizer."""

    def __init__(self, kind: str):
        super().__init__()
        self.part, self.weight = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
        everything = list(self.parameters())
        self.held: Any = {
            "optimizer": torch.optim.Adam(everything),
            "list": everything,
            "dict": {"one": self.part.weight},
            "tuple of an object": Cache([(self.part.weight,)]),
        }[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) * self.weight


@pytest.mark.parametrize("kind", ["optimizer", "list", "dict", "tuple of an object"])
def test_parameters_that_an_attribute_holds_are_parameters(kind: str):
    module, x = Holding(kind), torch.randn(3, 2)
    ported = tpuport.convert(module)
    assert list(ported.params) == [name for name, _ in module.named_parameters()]

    def loss(params: Any) -> Any:
        return ported.apply(params, ported.buffers, jax.random.key(0), x)[0].sum()

    got = jax.jit(jax.grad(loss))(ported.params)
    module(x).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert np.abs(got[name] - parameter.grad.numpy()).max() < 1e-6


class Irrep(tuple[Any, ...]):
    """As in e3nn: a tuple whose length is not to be asked for."""

    def __len__(self) -> int:
        raise NotImplementedError


GLOBAL_IRREPS = Irrep((Irrep((3, 1)),))


class Built(nn.Module):
    """As in ema_pytorch: made with an argument."""

    def __new__(cls, inner: nn.Module) -> "Built":
        return super().__new__(cls)

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.irrep = inner, Irrep((2, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.irrep[0] * GLOBAL_IRREPS[0][0]


def test_no_code_of_the_classes_runs_when_a_module_is_copied():
    module, x = Built(nn.Linear(2, 2)), torch.randn(3, 2)
    assert torch.allclose(tpuport.to_torch(tpuport.convert(module)(x)), module(x), atol=1e-6)


CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "list": ([1, 2], lambda v: v.append(3)),
    "dict": ({"a": 1, "b": 2}, lambda v: v.pop("a")),
    "ordered": (OrderedDict(a=1, b=2), lambda v: v.pop("a")),
    "deque": (deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "set": ({1, 2}, lambda v: v.add(3)),
    "dataclass": (Cache(1), lambda v: setattr(v, "seen", 5)),
    "new attribute": (Cache(1), lambda v: setattr(v, "new", 5)),
    "inner": (Cache([deque([1])]), lambda v: v.keys[0].append(2)),
}


class Unnamed:
    """A key that cannot be printed."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Unnamed) and other.number == self.number

    def __str__(self) -> str:
        raise AttributeError("no text")


class ByKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = {Unnamed(i): torch.full((2,), float(i)) for i in range(3)}
        self.pairs = {(Unnamed(0), "b"): 2.0, 7: 3.0}

    def forward(self, x: torch.Tensor) -> dict[Any, torch.Tensor]:
        self.table[Unnamed(1)] = self.table[Unnamed(1)] + x
        return {Unnamed(4): self.table[Unnamed(1)] * self.pairs[Unnamed(0), "b"], 7: x}


def test_no_text_of_a_key_is_made():
    eager, ported = ByKeys(), tpuport.convert(ByKeys())
    for i in range(2):
        x = torch.full((2,), float(i))
        ours, theirs = tpuport.to_torch(ported(x)), eager(x)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", CHANGES)
def test_a_snapshot_restores_and_applies_a_change(name: str):
    value, change = CHANGES[name]
    before = pytree.unflatten(pytree.flatten(value, objects=True)[1], [])
    snapshot = Snapshot([value])
    change(value)
    changed = pytree.unflatten(pytree.flatten(value, objects=True)[1], [])
    changes = snapshot.changes()
    assert not same_value(value, before)
    snapshot.restore()
    assert same_value(value, before)
    snapshot.apply(changes)
    assert same_value(value, changed)


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[torch.Tensor] = deque([torch.ones(2)], maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.recent.append(x)
        return torch.stack(list(self.recent)).sum(0)


def test_a_call_leaves_the_deque_of_the_original_alone():
    model = Window()
    ported = tpuport.convert(model)
    for value in (2.0, 3.0):
        expected = (1.0 if value == 2.0 else 2.0) + value
        assert tpuport.to_torch(ported(torch.full((2,), value))).tolist() == [expected] * 2
    assert [t.tolist() for t in model.recent] == [[1.0, 1.0]]


class Shortened(nn.Module):
    def forward(self, x: torch.Tensor, held: OrderedDict[str, Any]) -> torch.Tensor:
        held.pop("old")
        held["new"] = x * 2
        return x + 1


def test_a_call_may_take_a_key_out_of_an_ordered_dict():
    held: OrderedDict[str, Any] = OrderedDict(old=1, kept=2)
    tpuport.convert(Shortened())(torch.ones(2), held)
    assert list(held) == ["kept", "new"]
    assert list(reversed(held)) == ["new", "kept"]


class Branching(nn.Module):
    def forward(self, x: torch.Tensor, recent: deque[torch.Tensor]) -> torch.Tensor:
        if x.sum() > 0:
            recent.append(x * 2)
        else:
            recent.append(x * 3)
        return recent[-1] + len(recent)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_each_side_of_a_branch_begins_with_the_same_deque(sign: float):
    x = torch.full((2,), sign)
    expected = Branching()(x, theirs := deque([torch.zeros(2)], maxlen=4))
    out = tpuport.convert(Branching())(x, ours := deque([torch.zeros(2)], maxlen=4))
    assert tpuport.to_torch(out).tolist() == expected.tolist()
    assert [tpuport.to_torch(t).tolist() for t in ours] == [t.tolist() for t in theirs]
