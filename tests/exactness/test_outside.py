"""Python values outside of the port: what code read of them is part of its program."""

import builtins
import contextvars
import copy
import os
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError, UsageError
from tpuport.training import from_torch, make_train_step

X = torch.linspace(-1, 1, 6).reshape(2, 3)

NUMBER, UNREAD = 1.0, 0
PLAIN: dict[str, Any] = {"scale": 1.0, "inner": {"scale": [1.0]}}
LIST, SET, ARRAY, TENSOR = [1.0], {"a"}, np.ones(3), torch.ones(3)
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
LIBRARY = types.ModuleType("library")
LIBRARY.scale = 1.0  # type: ignore[attr-defined]


class NamesBuiltins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known: Any = __builtins__
        assert "len" in (known if isinstance(known, dict) else vars(known))
        if x.shape[0] == 3:
            raise ValueError("three rows")
        return self.layer(x)


class Options:
    scale = 1.0

    def __init__(self) -> None:
        self.own, self.unread = 1.0, 0

    def twice(self) -> float:
        return 2.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


OPTIONS, SLOTTED = Options(), Slotted()


def helper(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def deeper(x: torch.Tensor) -> torch.Tensor:
    return x * NUMBER


def with_default(x: torch.Tensor, scales: Any = (1.0, [2.0])) -> torch.Tensor:
    return x * scales[1][0]


def _closure() -> tuple[Callable[..., Any], Callable[[float], None], list[float]]:
    scale, held = 1.0, [1.0]

    def read(x: torch.Tensor) -> torch.Tensor:
        return x * scale * held[0]

    def write(value: float) -> None:
        nonlocal scale
        scale = value

    return read, write, held


CLOSURE, WRITE, HELD = _closure()


class OfClass(nn.Module):
    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x) * self.factor

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def never_called(self) -> float:
        return float(UNREAD)


def _set(holder: Any, name: str, value: Any) -> Callable[[Any], None]:
    def change(to: Any) -> None:
        setattr(holder, name, value(to))

    return change


def _globals(name: str, value: Callable[[float], Any]) -> Callable[[float], None]:
    return lambda to: globals().__setitem__(name, value(to))


def _scaled_helper(to: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x + to


def _scaled_method(to: float) -> Callable[..., torch.Tensor]:
    return lambda self, x: x * to


# By name: the code, and what a script does to what it reads.
READS: dict[str, tuple[Any, Callable[[float], Any]]] = {
    "global number": (lambda x: x * NUMBER, _globals("NUMBER", float)),
    "through a function": (lambda x: deeper(x), _globals("NUMBER", float)),
    "kind of a number": (lambda x: (x > 0) * NUMBER, _globals("NUMBER", lambda v: int(v))),
    "dict": (lambda x: x * PLAIN["scale"], lambda v: PLAIN.update(scale=v)),
    "nested": (
        lambda x: x * PLAIN["inner"]["scale"][0],
        lambda v: PLAIN["inner"]["scale"].__setitem__(0, v),
    ),
    "list": (lambda x: x * sum(LIST), LIST.append),
    "set": (lambda x: x * len(SET), lambda v: SET.add(v)),
    "array": (lambda x: x * float(ARRAY[0]), lambda v: ARRAY.__setitem__(0, v)),
    "tensor": (lambda x: x * TENSOR, _globals("TENSOR", lambda v: torch.full((3,), v))),
    "attribute": (lambda x: x * OPTIONS.own, _set(OPTIONS, "own", float)),
    "slot": (lambda x: x * SLOTTED.scale, _set(SLOTTED, "scale", float)),
    "class attribute": (lambda x: x * Options.scale, _set(Options, "scale", float)),
    "method": (lambda x: x * OPTIONS.twice(), _set(Options, "twice", lambda v: lambda self: v)),
    "function": (lambda x: helper(x), _globals("helper", _scaled_helper)),
    "module": (lambda x: x * LIBRARY.scale, _set(LIBRARY, "scale", float)),  # type: ignore[attr-defined]
    "environment": (
        lambda x: x * float(os.environ.get("TPUPORT_TEST_SCALE", "1")),
        lambda v: os.environ.__setitem__("TPUPORT_TEST_SCALE", str(v)),
    ),
    "context variable": (lambda x: x * VARIABLE.get(), VARIABLE.set),
    "default": (with_default, lambda v: with_default.__defaults__[0][1].__setitem__(0, v)),
    "closure": (CLOSURE, WRITE),
    "list in a closure": (CLOSURE, lambda v: HELD.__setitem__(0, v)),
    "class of a module": (OfClass(), _set(OfClass, "factor", float)),
    "method of a module": (OfClass(), _set(OfClass, "scaled", _scaled_method)),
}


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch):
    before = copy.deepcopy((PLAIN, LIST, SET, ARRAY))
    monkeypatch.setenv("TPUPORT_TEST_SCALE", "1")
    names = {n: globals()[n] for n in ("NUMBER", "TENSOR", "UNREAD", "helper")}
    own = [vars(OfClass)["scaled"], vars(Options)["twice"]]
    yield
    globals().update(names)
    PLAIN.update(before[0])
    LIST[:], ARRAY[:] = before[1], before[3]
    SET.clear()
    SET.update(before[2])
    CACHE.clear()
    OfClass.scaled, Options.twice = own
    OfClass.factor = Options.scale = OPTIONS.own = SLOTTED.scale = LIBRARY.scale = 1.0  # type: ignore[attr-defined]
    VARIABLE.set(1.0)
    WRITE(1.0)
    HELD[0] = 1.0
    with_default.__defaults__[0][1][0] = 2.0  # type: ignore[index]


@pytest.mark.parametrize("what", READS)
def test_what_a_script_changes_outside_counts_at_the_next_call(what: str):
    target, change = READS[what]
    ported = tpuport.convert(target)
    assert torch.equal(ported(X).torch(), target(X))
    assert torch.equal(ported(X).torch(), target(X))
    assert not ported.report.retraces
    for value in (5.0, 3.0):
        change(value)
        assert torch.equal(ported(X).torch(), target(X)), value
    assert len(ported.report.retraces) == 2
    assert "changed" in ported.report.retraces[0].causes[0]


def test_a_program_is_kept_for_values_that_come_back():
    global NUMBER
    ported = tpuport.convert(lambda x: x * NUMBER)
    for _ in range(8):
        for value in (1.0, 2.0):
            NUMBER = value
            assert torch.equal(ported(X).torch(), X * value)
    assert len(ported.report.retraces) == 1


def test_what_the_code_does_not_read_is_no_reason_for_another_program():
    global UNREAD
    ported = tpuport.convert(OfClass())
    ported(X)
    plain = tpuport.convert(lambda x: x * OPTIONS.own)
    plain(X)
    # The key of a dict has the name of a global.
    keyed = tpuport.convert(lambda batch: batch["UNREAD"] * 3)
    keyed({"UNREAD": X})
    UNREAD, OPTIONS.unread = 1, 1
    os.environ["TPUPORT_TEST_OTHER"] = "1"
    assert torch.equal(ported(X).torch(), X * 2)
    assert torch.equal(plain(X).torch(), X)
    assert torch.equal(keyed({"UNREAD": X}).torch(), X * 3)
    del os.environ["TPUPORT_TEST_OTHER"]
    assert not ported.report.retraces
    assert not plain.report.retraces
    assert not keyed.report.retraces


def by_string(x: torch.Tensor) -> torch.Tensor:
    return x * globals()["NUMBER"]


def test_a_global_that_is_read_by_its_name_is_seen():
    global NUMBER
    ported = tpuport.convert(by_string)
    for value in (1.0, 2.0):
        NUMBER = value
        assert torch.equal(ported(X).torch(), X * value)
    NUMBER = 1.0


def test_a_new_program_is_compared_with_eager_as_the_first_one():
    global NUMBER
    ported = tpuport.convert(lambda x: x * NUMBER)
    ported(X)
    ported(X)
    before = ported.report.timing.observe
    ported(X)
    assert ported.report.timing.observe == before
    NUMBER = 2.0
    ported(X)
    assert ported.report.timing.observe > before


def test_a_value_that_changes_before_each_call_is_refused():
    ported = tpuport.convert(lambda x: x * NUMBER)

    def calls() -> None:
        global NUMBER
        for step in range(9):
            NUMBER = float(step)
            ported(X)

    with pytest.raises(PortError, match=r"NUMBER changed, and such changes came before each"):
        calls()


def test_a_training_step_sees_them_too():
    global NUMBER
    model = nn.Linear(3, 1)
    loss = lambda m, x: (m(x) * NUMBER).square().mean()  # noqa: E731
    twin, ported = copy.deepcopy(model), tpuport.convert(model)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    step = make_train_step(
        ported, loss, from_torch(ported, torch.optim.SGD(model.parameters(), 0.1))
    )
    state = step.init(seed=0)
    for value in (1.0, 3.0):
        NUMBER = value
        optimizer.zero_grad()
        loss(twin, X).backward()
        optimizer.step()
        state, _ = step(state, X)
    step.load_state(state)
    assert torch.allclose(ported.to_torch().weight, twin.weight, atol=1e-6)


COUNT, CACHE = 0, {}


def counts(x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return x * COUNT


def keeps_result(x: torch.Tensor) -> torch.Tensor:
    if "y" not in CACHE:
        CACHE["y"] = x * 2
    return CACHE["y"] + x


def keeps_table(x: torch.Tensor) -> torch.Tensor:
    if "table" not in CACHE:
        CACHE["table"] = torch.arange(3.0)
    return CACHE["table"] + x


@pytest.mark.parametrize("verify", [True, False])
def test_a_call_that_writes_outside_each_time_is_refused_and_leaves_nothing(verify: bool):
    ported = tpuport.convert(counts, verify=verify)
    with pytest.raises(PortError, match=r"counts writes to .*COUNT"):
        ported(X)
    assert COUNT == 0


def test_a_tensor_of_a_trace_is_not_kept_outside():
    ported = tpuport.convert(keeps_result, verify=False)
    with pytest.raises(PortError, match=r"keeps_result writes to .*CACHE"):
        ported(X)
    assert not CACHE


@pytest.mark.parametrize(("function", "name"), [(keeps_table, "table"), (keeps_result, "y")])
def test_what_a_call_keeps_at_its_first_use_stays(function: Any, name: str):
    ported = tpuport.convert(function)
    given = [X, X * 2, X * 3]
    found = [ported(x).torch() for x in given]
    assert isinstance(CACHE.pop(name), torch.Tensor)
    assert all(torch.equal(a, function(x)) for a, x in zip(found, given, strict=True))


class Hidden(nn.Module):
    """Calls a module that is no part of it with its own parameters, and puts that one's back."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Linear(3, 2)
        self.weights = nn.ParameterDict({n: p * 2 for n, p in inner.named_parameters()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = HIDDEN[0]
        held = dict(inner._parameters)
        inner._parameters.update(self.weights)
        y = inner(x)
        inner._parameters.update(held)
        return y.tanh()


HIDDEN = [nn.Linear(3, 2)]


def test_a_module_outside_that_is_lent_parameters_and_gets_its_own_back():
    eager = Hidden()
    own = dict(HIDDEN[0]._parameters)
    port = tpuport.convert(copy.deepcopy(eager))
    for x in (torch.ones(2, 3), torch.eye(3)):
        torch.testing.assert_close(port(x).torch(), eager(x).detach())
    assert len(port.report.retraces) == 1  # for another batch
    grads = jax.grad(lambda params: port.apply(params, port.buffers, None, x)[0].sum())(port.params)
    eager(x).sum().backward()
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(tpuport.to_torch(grads[name]), parameter.grad)
    assert all(HIDDEN[0]._parameters[name] is held for name, held in own.items())


# -- the module of a port --------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.scale, self.act = nn.Linear(3, 3), 1.0, nn.Identity()
        self.norm, self.options = nn.BatchNorm1d(3), Options()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.enter(x)) * self.scale) * self.options.own


def _tripled(net: nn.Module) -> None:
    with torch.no_grad():
        net.enter.weight.mul_(3)


EDITS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda m: setattr(m, "scale", 5.0),
    "object": lambda m: setattr(m.options, "own", 5.0),
    "submodule": lambda m: setattr(m, "act", nn.Tanh()),
    "submodule with weights": lambda m: setattr(m, "act", nn.LayerNorm(3)),
    "hook": lambda m: m.enter.register_forward_hook(lambda mod, i, o: o + 100),
    "mode of a part": lambda m: m.norm.train(),
    "method of the object": lambda m: setattr(m, "forward", lambda x: x * 7),
    "write": _tripled,
    "data": lambda m: m.enter.weight.data.mul_(3),
    "numpy": lambda m: m.enter.weight.detach().numpy().fill(2),
    "load_state_dict": lambda m: m.load_state_dict(
        {name: torch.ones_like(value) for name, value in m.state_dict().items()}
    ),
}


@pytest.mark.parametrize("what", EDITS)
def test_edits_of_the_ported_module_count_at_the_next_call(what: str):
    torch.manual_seed(0)
    model = Net().eval()
    eager, ported = copy.deepcopy(model), tpuport.convert(model)
    ported(X)
    EDITS[what](eager)
    EDITS[what](ported.module)
    assert torch.allclose(ported(X).torch(), eager(X), atol=1e-5)
    assert torch.allclose(ported(X).torch(), eager(X), atol=1e-5)
    eager.scale = ported.module.scale = 0.5
    assert torch.allclose(ported(X).torch(), eager(X), atol=1e-5)


def test_writes_to_the_users_own_model_are_no_edits_of_the_port():
    model = Net().eval()
    ported = tpuport.convert(model)
    before = ported(X).torch()
    assert ported.module.scale == 1.0
    _tripled(model)
    model.scale = 9.0
    assert torch.equal(ported(X).torch(), before)


class Flat(nn.Module):
    """Weights that are views of one buffer, as where optimizers keep all weights in one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("flat", torch.linspace(-1, 1, size * size + size))
        self.weight = nn.Parameter(self.flat[: size * size].view(size, size))
        self.bias = nn.Parameter(self.flat[size * size :])
        self.norm = nn.BatchNorm1d(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(nn.functional.linear(x, self.weight, self.bias))


@pytest.mark.parametrize("size", [3, 200])  # memory is copied at once, or when it is written
def test_the_ported_module_has_the_weights_of_now_and_memory_of_its_own(size: int):
    model = Flat(size)
    kept, eager = Flat(size), Flat(size)  # a deep copy of a parameter is no view
    ported = tpuport.convert(model)
    x = torch.linspace(-2, 3, 4 * size).view(4, size)
    edits = [
        lambda m: m.flat.data.mul_(0.5),
        lambda m: m.weight.data[1].fill_(2),
        lambda m: m.bias.detach().add_(1),
        lambda m: m.load_state_dict({**m.state_dict(), "bias": torch.zeros(size)}),
    ]
    for edit in edits:
        torch.testing.assert_close(ported(x).torch(), eager(x), rtol=1e-4, atol=1e-4)
        shown = ported.module.state_dict()
        for name, value in eager.state_dict().items():
            torch.testing.assert_close(shown[name], value, msg=name)
        edit(eager)
        edit(ported.module)
    torch.testing.assert_close(ported(x).torch(), eager(x), rtol=1e-4, atol=1e-4)
    for name, value in kept.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_weight_that_has_another_value_by_now_cannot_be_written_in_the_module():
    ported = tpuport.convert(Net().eval())
    module = ported.module
    ported.params["enter.weight"] = ported.params["enter.weight"] * 2
    _tripled(module)
    with pytest.raises(UsageError, match=r"enter.weight was written in `ported.module`, and the"):
        ported(X)


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.scale = 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x * self.steps * self.scale


def test_a_module_whose_state_a_call_changes_can_be_edited():
    eager, ported = Steps(), tpuport.convert(Steps())
    for scale in (1.0, 2.0, 3.0, 4.0, 5.0):
        eager.scale = ported.module.scale = scale
        assert torch.equal(ported(X).torch(), eager(X))
        assert ported.module.steps == eager.steps
    eager.steps = ported.module.steps = 20
    for _ in range(3):
        assert torch.equal(ported(X).torch(), eager(X))


class Exchanges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.act, nn.Identity):
            self.act = nn.Sequential(nn.ReLU())
        return self.act(x)


def test_a_module_that_a_call_has_replaced_says_so():
    ported = tpuport.convert(Exchanges())
    old = ported.module
    ported(X)
    old.act = nn.Tanh()
    with pytest.raises(UsageError, match=r"take `ported.module` again"):
        ported(X)


def test_the_mode_of_the_users_module_is_not_ignored_without_a_word():
    model = nn.Dropout(0.5)
    ported = tpuport.convert(model)
    ported(X)
    model.eval()
    with pytest.raises(UsageError, match=r"eval\(\) was called on the Dropout after it was conv"):
        ported(X)
    ported.eval()
    assert torch.equal(ported(X).torch(), X)
    model.train()
    assert torch.equal(ported(X).torch(), X)


@pytest.mark.parametrize("namespace", ["builtins", "module", "dict"])
def test_a_call_that_raises_leaves_namespaces_whole(namespace: str):
    """Values outside are put back after an error, by code that may itself read them."""
    space: dict[str, Any] = vars(LIBRARY) if namespace == "module" else dict(vars(LIBRARY))

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            space["scale"] = 5.0
            if x.shape[0] == 3:
                raise ValueError("three rows")
            return self.layer(x)

    made = NamesBuiltins() if namespace == "builtins" else Reads()
    before, scale = dict(vars(builtins)), space["scale"]
    ported = tpuport.convert(made)
    with pytest.raises(ValueError, match="three rows"):
        ported(torch.ones(3, 3))
    assert vars(builtins) == before
    assert space["scale"] == scale
    if namespace == "builtins":
        torch.testing.assert_close(tpuport.to_torch(ported(X)), made(X))
