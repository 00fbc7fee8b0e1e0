"""What a call leaves in the objects that were passed to it: caches, lists, counters."""

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError


class Cache:
    def __init__(self) -> None:
        self.keys: Any = None
        self.seen = 0

    def update(self, new: torch.Tensor) -> torch.Tensor:
        self.keys = new if self.keys is None else torch.cat([self.keys, new])
        self.seen += new.shape[0]
        return self.keys


class Slotted:
    __slots__ = ("keys", "more")

    def __init__(self) -> None:
        self.keys = None
        self.more = []


@dataclass
class Layers:
    layers: list[Cache] = field(default_factory=list)
    index: dict[str, Cache] = field(default_factory=dict)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x, cache):
        return cache.update(self.proj(x)).sum(0) * x


class Slots(nn.Module):
    def forward(self, x, cache):
        cache.keys = x * 2
        cache.more.append(cache.keys + 1)
        return cache.keys.sum()


class Containers(nn.Module):
    def forward(self, x, held):
        held["list"].append(x * 2)
        held["deque"].append(x + 1)
        held["new"] = {"a": (x - 1, [x * 3]), "same": held["list"]}
        held["default"]["c"].append(x * 5)
        held["old"].clear()
        held["ordered"]["b"] = x * 4
        held["set"].add(3)
        held.pop("gone")
        held["array"][1] = 7.0
        return x.sum()


def containers() -> dict[str, Any]:
    return {
        "list": [],
        "deque": deque([torch.zeros(2)], maxlen=1),
        "old": {"k": torch.ones(2)},
        "ordered": OrderedDict(a=1),
        "default": defaultdict(list),
        "set": {1, 2},
        "gone": torch.zeros(1),
        "array": np.zeros(3),
    }


def growing(x, layers):
    layers.layers.append(Cache())
    layers.layers[-1].update(x)
    layers.index["last"] = layers.layers[-1]
    return x * len(layers.layers)


def assert_same(ours: Any, theirs: Any) -> None:
    ours, theirs = tpuport.to_torch(ours), tpuport.to_torch(theirs)
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs)
    elif isinstance(theirs, np.ndarray):
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for name in theirs:
            assert_same(ours[name], theirs[name])
    elif isinstance(theirs, (list, tuple, deque)):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif hasattr(theirs, "__dict__") or hasattr(theirs, "__slots__"):
        names = [*getattr(theirs, "__dict__", ()), *getattr(theirs, "__slots__", ())]
        for name in names:
            assert_same(getattr(ours, name), getattr(theirs, name))
    else:
        assert ours == theirs


CALLS = {
    "empty_cache": (Attention, Cache),
    "slots": (Slots, Slotted),
    "containers": (Containers, containers),
    "layers": (lambda: growing, Layers),
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_objects_of_the_caller_change_as_in_eager(name: str, verify: bool):
    make, make_held = CALLS[name]
    torch.manual_seed(0)
    target = make()
    ported = tpuport.convert(target, verify=verify)
    ours, theirs = make_held(), make_held()
    for _ in range(3):
        if name == "containers":
            ours, theirs = make_held(), make_held()
        x = torch.randn(4 if name != "containers" else 2)[None, :].expand(2, -1).contiguous()
        out = ported(x, ours)
        with torch.no_grad():
            assert_same(out, target(x, theirs))
        assert_same(ours, theirs)


def test_containers_that_were_shared_stay_shared():
    ported = tpuport.convert(Containers(), verify=False)
    held = containers()
    before = held["list"]
    ported(torch.ones(2), held)
    assert held["list"] is before
    assert held["new"]["same"] is before
    assert len(before) == 1


def test_a_cache_goes_on_where_the_last_call_left_it():
    torch.manual_seed(0)
    model = Attention()
    ported = tpuport.convert(model, verify=False)
    ours, theirs = Cache(), Cache()
    for _ in range(4):
        x = torch.randn(2, 4)
        with torch.no_grad():
            expected = model(x, theirs)
        assert_same(ported(x, ours), expected)
    assert ours.seen == theirs.seen == 8
    assert tuple(ours.keys.shape) == (8, 4)


def test_a_cache_is_not_left_half_written_by_a_refused_call():
    def refused(x, cache):
        cache.keys = x * 2
        return torch.zeros(int(x.sum()))

    ported = tpuport.convert(refused, verify=False)
    cache = Cache()
    with pytest.raises(PortError):
        ported(torch.rand(3), cache)
    assert cache.keys is None


def test_example_inputs_are_left_alone():
    cache, x = Cache(), torch.ones(2, 4)
    tpuport.convert(Attention(), (x, cache))
    assert cache.keys is None
    assert cache.seen == 0


def test_apply_leaves_the_arguments_alone():
    ported = tpuport.convert(Attention(), verify=False)
    cache = Cache()
    ported.apply(ported.params, ported.buffers, None, torch.ones(2, 4), cache)
    assert cache.keys is None


@dataclass
class Settings:
    scale: float = 1.0
    table: Any = None


def scaled(x, settings):
    return x * settings.scale + (0 if settings.table is None else float(settings.table[0]))


def test_an_attribute_changed_between_calls_is_seen():
    ported = tpuport.convert(scaled, verify=False)
    settings = Settings(2.0, np.zeros(2))
    x = torch.ones(2)
    assert_same(ported(x, settings), x * 2)
    settings.scale = 3.0
    assert_same(ported(x, settings), x * 3)
    settings.table[0] = 1.0
    assert_same(ported(x, settings), x * 3 + 1)
    assert any("scale" in str(r) or "non-tensor" in str(r) for r in ported.report.retraces)


def test_a_set_of_tensors_in_the_output():
    ported = tpuport.convert(lambda x: {x + 1}, verify=False)
    (one,) = ported(torch.zeros(2))
    assert_same(one, torch.ones(2))


@pytest.mark.parametrize("kind", ["numpy", "python"])
def test_a_random_generator_of_the_host_is_refused_as_an_argument(kind: str):
    import random

    def made() -> Any:
        return np.random.default_rng(0) if kind == "numpy" else random.Random(0)

    def noisy(x, source):
        return x * float(source.random())

    ported = tpuport.convert(noisy, verify=False)
    with pytest.raises(PortError, match="drew random numbers from") as caught:
        ported(torch.ones(2), made())
    assert caught.value.code == "TPU404"

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source = made()

        def forward(self, x):
            return x * float(self.source.random())

    ported, eager = tpuport.convert(Holder(), verify=False), made()
    for _ in range(3):
        assert_same(ported(torch.ones(2)), torch.ones(2) * eager.random())


@pytest.mark.parametrize("verify", [False, "first"])
def test_a_torch_generator_of_the_module_is_refused(verify):
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source = torch.Generator().manual_seed(3)

        def forward(self, x):
            return x + torch.rand(2, generator=self.source)

    module = Holder()
    before = module.source.get_state()
    with pytest.raises(
        PortError, match=r"(?s)a torch\.Generator .*pass the torch\.Generator"
    ) as caught:
        tpuport.convert(module, verify=verify)(torch.ones(2))
    assert caught.value.code == "TPU404"
    assert torch.equal(module.source.get_state(), before)
