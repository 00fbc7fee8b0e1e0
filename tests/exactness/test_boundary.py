"""What crosses the boundary of a ported call, and what is left untouched outside of it.

Contents:
    STRUCTURES         outputs keep their structure: ModelOutput, UserDict, dataclass, namedtuple,
                       dict, custom objects
    test_methods_*     several methods, free functions, callables, keyword arguments
    test_meta_*        models without weights
    test_dtype_*       bfloat16 stays bfloat16, int64 stays int64, torch's dtype errors are raised
    test_untouched_*   the module, its class, torch functions and global state are as before
"""

import collections
import copy
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.feature_extraction_utils import BatchFeature
from transformers.modeling_outputs import BaseModelOutput

import tpuport
from tests.exactness.plain_torchax import PlainTorchax
from tests.exactness.scenario import assert_same, by_tpuport, expect_torchax_wrong, host, normal
from tpuport.foundation.errors import PortError, UsageError

X = normal(4, 6)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor
    name: str


@dataclasses.dataclass
class Nested:
    pair: Pair
    extra: dict[str, Any]
    missing: torch.Tensor | None = None


class Ordered(collections.OrderedDict):
    """A subclass with an attribute."""

    note = "kept"


class Cache:
    """A plain object with tensors in a list, as key-value caches are."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.seen = 0

    def update(self, key: torch.Tensor) -> torch.Tensor:
        self.keys.append(key)
        self.seen += key.shape[0]
        return torch.cat(self.keys)


def _cache(x: torch.Tensor) -> Any:
    cache = Cache()
    cache.update(x)
    return cache.update(x * 2), cache


STRUCTURES: dict[str, Any] = {
    "tensor": lambda x: x * 2,
    "none": lambda x: None,
    "number": lambda x: 3,
    "empty_tuple": lambda x: (),
    "tuple_with_none": lambda x: (x, None, "text", 1.5),
    "list": lambda x: [x, [x * 2, (x * 3,)]],
    "dict": lambda x: {"a": x, 3: x * 2, "b": {"c": None}},
    "ordered": lambda x: Ordered(b=x, a=x * 2),
    "defaultdict": lambda x: collections.defaultdict(list, a=[x]),
    "namedtuple": lambda x: Pair(x, {"k": x + 1}),
    "frozen_dataclass": lambda x: Frozen(x, "n"),
    "nested_dataclass": lambda x: Nested(Pair(x, None), {"y": [x * 2]}),
    "model_output": lambda x: BaseModelOutput(last_hidden_state=x, hidden_states=(x, x * 2)),
    "batch_feature": lambda x: BatchFeature({"pixels": x, "ids": x.argmax(1)}),
    "custom_object": _cache,
    "shared_tensor": lambda x: (x, [x], {"again": x}),
    "unchanged_input": lambda x: x,
    "distribution": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False),
    "deque": lambda x: collections.deque([x, x * 2], maxlen=2),
    "return_types": lambda x: x.max(1),
    "size_and_dtype": lambda x: (x.shape, x.dtype, x.device.type if False else None),
}


def _same_structure(got: Any, want: Any, path: str = "output") -> None:
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), path
        assert got.dtype == want.dtype, path
        assert_same(got, want, path)
        return
    assert type(got) is type(want), f"{path}: {type(got)} for {type(want)}"
    if isinstance(want, collections.deque):
        assert got.maxlen == want.maxlen
    if isinstance(want, dict):
        assert list(got) == list(want), path
        for key in want:
            _same_structure(got[key], want[key], f"{path}[{key!r}]")
    elif isinstance(want, (list, tuple, collections.deque)):
        assert len(got) == len(want), path
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            _same_structure(a, b, f"{path}[{index}]")
    if hasattr(want, "__dict__") and not isinstance(want, type):
        assert vars(got).keys() == vars(want).keys(), path
        for name, value in vars(want).items():
            _same_structure(vars(got)[name], value, f"{path}.{name}")
    elif not isinstance(want, (list, tuple, dict, collections.deque)) or isinstance(
        want, torch.Size
    ):
        assert got == want or type(want).__module__ != "builtins", path


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_of_the_output(name):
    program = STRUCTURES[name]
    ported = by_tpuport(program)
    want = program(X)
    _same_structure(ported(X), want)
    _same_structure(ported(X), want)
    out, _ = ported.apply({}, {}, None, X)
    assert type(out) is type(want) or isinstance(want, torch.Tensor)


def test_structure_behaves_as_its_class():
    output = by_tpuport(STRUCTURES["model_output"])(X)
    assert output.last_hidden_state is output[0] is output["last_hidden_state"]
    assert len(output.to_tuple()) == 2
    feature = by_tpuport(STRUCTURES["batch_feature"])(X)
    assert feature.pixels is feature["pixels"]
    shared = by_tpuport(STRUCTURES["shared_tensor"])(X)
    assert shared[0] is shared[1][0] is shared[2]["again"]


@pytest.mark.parametrize("name", ["namedtuple", "nested_dataclass", "batch_feature"])
def test_structure_of_the_arguments(name):
    argument = STRUCTURES[name](X)

    def program(value: Any) -> Any:
        leaf = (
            value.left
            if name == "namedtuple"
            else value.pair.left
            if name == "nested_dataclass"
            else value["pixels"]
        )
        return leaf * 2, value

    got, back = by_tpuport(program)(argument)
    assert_same(got, X * 2, "output")
    _same_structure(back, argument)


@expect_torchax_wrong("a UserDict does not cross a jit boundary")
def test_structure_under_plain_torchax():
    PlainTorchax(STRUCTURES["batch_feature"])(X)


# Methods.


class Planner(nn.Module):
    """Two entry points that share weights and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(
        self, x: torch.Tensor, *, scale: float = 1.0, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.count += 1
        y = self.linear(x) * scale
        return y if mask is None else y * mask

    @torch.no_grad()
    def get_action(self, x: torch.Tensor, steps: int = 2) -> dict[str, torch.Tensor]:
        for _ in range(steps):
            x = self(x).tanh()
        return {"action": x}


def test_methods_share_state():
    torch.manual_seed(0)
    eager = Planner()
    ported = tpuport.convert(eager, methods=("forward", "get_action"), verify=False)
    assert_same(
        ported.get_action(X, steps=3)["action"],
        eager.get_action(X, steps=3)["action"],
        "action",
        1e-4,
    )
    assert_same(ported(X, scale=2.0, mask=X > 0), eager(X, scale=2.0, mask=X > 0), "forward", 1e-4)
    assert_same(ported.buffers["count"], eager.count, "count")
    out, _ = ported.apply(ported.params, ported.buffers, None, X, method="get_action", steps=1)
    assert_same(out["action"], eager.get_action(X, steps=1)["action"], "apply", 1e-4)


def test_methods_that_were_not_named_are_refused():
    with pytest.raises(AttributeError, match=r"methods=\('forward', 'get_action'\)"):
        by_tpuport(Planner()).get_action(X)


def test_methods_of_verification_run_on_the_first_call():
    ported = tpuport.convert(Planner(), methods=("forward", "get_action"))
    ported(X)
    ported.get_action(X)
    assert ported.report.verified
    assert {p.kind for p in ported.report.parity} >= {"output", "buffer"}


def test_methods_hooks_run_as_in_eager():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert_same(by_tpuport(model)(X), model(X), "output", 1e-4)


def test_function_with_a_module_in_its_closure():
    model = nn.BatchNorm1d(6)
    reference = copy.deepcopy(model)

    def program(x: torch.Tensor) -> torch.Tensor:
        return model(x) * 2

    want = reference(X) * 2
    try:
        got = by_tpuport(program)(X)
    except PortError:
        return  # refusing to write to state outside is allowed
    assert_same(got, want, "output")
    assert_same(model.running_mean, reference.running_mean, "state of the closure", atol=1e-6)


# Models without weights.


def test_meta_model_has_shapes_and_no_values():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    ported = tpuport.convert(model, args=(torch.empty(4, 6, device="meta"),))
    shape = ported.eval_shape(torch.empty(4, 6, device="meta"))
    assert (shape.shape, shape.dtype) == ((4, 3), jnp.float32)
    assert ported.params["0.weight"].shape == (3, 6)
    with pytest.raises(UsageError, match=r"meta device(.|\n)*eval_shape"):
        ported(X)
    with pytest.raises(UsageError, match="to_torch\\(\\) needs weights"):
        ported.to_torch()


# Dtypes.


def test_dtype_bfloat16_stays_and_float32_islands_too():
    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6).bfloat16()
            self.norm = nn.LayerNorm(6)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.linear(x)
            z = self.norm(y.float()).type_as(y)
            return (
                y,
                z,
                y.softmax(-1),
                y + 1.5,
                y * torch.tensor(2.0),
                y.sum(),
                y.mean(0),
                y @ y.T,
                y.float() + y,
            )

    torch.manual_seed(0)
    model = Island()
    want, got = model(X.bfloat16()), by_tpuport(model)(X.bfloat16())
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype
        assert_same(a, b, f"output {index}", 2e-2)


DTYPES: dict[str, Any] = {
    "index": lambda x: (
        x.argmax(1), x.nonzero().shape[1], x.sort(1)[1], torch.arange(3), x.long(), x.int() // 2,
    ),
    "promotion": lambda x: (
        x.int() + 1.5, x.bool() + 1, x.half() + x.bfloat16(),
        x.int() / 2, x.long().sum(), x.bool().sum(),
    ),
    "double": lambda x: (x.double(), x.double() + 1, (x > 0).double().mean()),
    "scalar": lambda x: (
        x.bfloat16() * torch.tensor(2.5), torch.tensor(2) * x,
        x.int() * torch.tensor(2.5), x.int().mean(dtype=torch.float32),
    ),
    "small": lambda x: (
        x.to(torch.uint8), x.to(torch.int8) * 2,
        x.to(torch.int16), (x.abs() * 50).to(torch.uint8) + 250,
    ),
    "complex": lambda x: (
        torch.complex(x, x), torch.fft.fft(x), torch.polar(x.abs(), x), torch.view_as_real(x * 1j),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_of_every_output_is_eagers(name):
    program = DTYPES[name]
    x = X.abs() if name == "small" else X
    for index, (got, want) in enumerate(zip(by_tpuport(program)(x), program(x), strict=True)):
        if isinstance(want, torch.Tensor):
            assert got.dtype == want.dtype, index
            assert host(got).dtype == want.dtype, index
            assert_same(
                host(got), want, f"output {index}", 1e-2 if want.dtype.itemsize == 2 else 1e-5
            )


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda x: x @ x.bfloat16().T, "same dtype"),
        (lambda x: F.linear(x, torch.ones(3, 6, dtype=torch.bfloat16)), "same dtype"),
        (lambda x: F.conv1d(x[None], torch.ones(2, 4, 1).half()), "same"),
        (lambda x: x[x.float()], "used as indices must be"),
    ],
    ids=["matmul", "linear", "conv", "index"],
)
def test_dtype_errors_are_torchs(program, message):
    with pytest.raises((RuntimeError, IndexError, NotImplementedError)):
        program(X.clone())
    with pytest.raises((RuntimeError, IndexError, NotImplementedError), match=message):
        by_tpuport(program)(X)


@expect_torchax_wrong("mixed dtypes are promoted where PyTorch refuses")
def test_dtype_errors_under_plain_torchax():
    with pytest.raises(RuntimeError):
        PlainTorchax(lambda x: x @ x.to(torch.bfloat16).T)(X)


# What is left untouched.


def test_untouched_module_and_global_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))
    model.register_forward_hook(lambda module, args, out: out)
    model(X).sum().backward()
    tensors = {
        name: (t, t.detach().clone(), t._version)
        for name, t in model.state_dict(keep_vars=True).items()
    }
    grads = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    attributes = [(vars(m), dict(vars(m))) for m in model.modules()]
    functions = [
        (owner, dict(vars(owner)))
        for owner in (torch, F, torch.Tensor, nn.Module, torch.utils.checkpoint)
    ]
    settings = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.backends.mkldnn.is_available(),
    )
    ported = tpuport.convert(model, args=(X,))
    ported(X)
    key = jax.random.key(0)
    gradient = jax.grad(lambda p: ported.apply(p, ported.buffers, key, X)[0].sum())
    jax.jit(gradient)(ported.params)
    for name, (tensor, value, version) in tensors.items():
        assert model.state_dict(keep_vars=True)[name] is tensor
        assert torch.equal(tensor, value), name
        assert tensor._version == version, name
    for name, (grad, value) in grads.items():
        assert dict(model.named_parameters())[name].grad is grad
        assert torch.equal(grad, value)
    for live, before in attributes:
        assert live.keys() == before.keys()
        assert all(live[k] is before[k] for k in before)
    for owner, before in functions:
        assert vars(owner).keys() == before.keys(), owner
        assert all(vars(owner)[k] is before[k] for k in before), owner
    assert settings == (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.backends.mkldnn.is_available(),
    )
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_untouched_after_an_error_in_the_middle():
    before = dict(vars(F)), dict(vars(nn.Module)), dict(vars(torch.autograd.Function))

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rand(6)
        raise KeyError("in the middle of", y.shape)

    for _ in range(2):
        with pytest.raises(KeyError, match="in the middle of"):
            by_tpuport(program)(X)
    assert before == (dict(vars(F)), dict(vars(nn.Module)), dict(vars(torch.autograd.Function)))
    assert torch.equal(X * 2, X + X)


def test_untouched_model_still_trains_and_the_port_does_not_follow():
    model = nn.Linear(6, 3)
    ported = by_tpuport(model)
    first = host(ported(X))
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(host(ported(X)), first)


def test_state_on_a_plain_tensor_attribute_is_kept_or_refused():
    """Written from host values alone: neither lost nor written to the user's own module."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = torch.zeros(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    model = Counter()
    ported = by_tpuport(model)
    try:
        outputs = [host(ported(X)) for _ in range(3)]
    except PortError:
        return
    assert torch.equal(model.calls, torch.zeros(1))
    for index, out in enumerate(outputs):
        assert_same(out, X * (index + 1), f"call {index}")


def noisy_loss(model, x, target, weight=1.0):
    """As a training script has it: randomness, a branch on values, metrics."""
    x = torch.nn.functional.dropout(x, 0.5)
    y = model(x)
    if y.abs().max() > 1:
        y = y / y.abs().max()
    return (y - target).square().mean() * weight, {"largest": y.max()}


def test_a_function_is_ported_like_a_method():
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    ported = tpuport.convert(model, methods=("forward", noisy_loss))
    x, target = torch.randn(16, 8), torch.randn(16, 4)
    first, metrics = ported.noisy_loss(x, target, weight=2.0)
    second, _ = ported.noisy_loss(x, target, weight=2.0)
    assert ported.report.verified
    assert float(first) != float(second)
    assert float(metrics["largest"]) <= 1
    assert int(ported.buffers["1.num_batches_tracked"]) == 2
    # Gradients of the model's weights, compared with autograd's.
    assert ported.verify(x, target, method="noisy_loss").ok
    assert {p.path for p in ported.report.parity if p.kind == "gradient"} >= {
        "grad.0.weight",
        "grad.1.bias",
    }
