"""Hooks that a call puts on modules or takes off: the calls after it see what eager ones do."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import transformers
from torch import nn

import tpuport
from tests.exactness.scenario import assert_same, normal
from tpuport.foundation.errors import PortError


class AtFirst(nn.Module):
    """Puts a hook on its layer at the first call, and notes that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.layer.register_forward_hook(lambda module, args, out: out * 3)
            self.layer.register_forward_pre_hook(
                lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
            )
            self.ready = True
        return self.layer(x)


class ForOneCall(nn.Module):
    """A hook for the length of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        handle = self.layer.register_forward_hook(lambda module, args, out: seen.append(out))
        out = self.layer(x)
        handle.remove()
        return out + seen[0].sum()


class Keeping(nn.Module):
    """Keeps the handle of a hook, for a later call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.handles: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.handles.append(self.layer.register_forward_hook(lambda module, args, out: out * 3))
        return self.layer(x)


class Last(nn.Module):
    """Takes off at its first call what was put on before it was ported."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.handle: Any = self.layer.register_forward_hook(lambda module, args, out: out * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        return out


class EachTime(nn.Module):
    """One more hook at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.register_forward_hook(lambda module, args, out: out * 3)
        return self.layer(x)


@pytest.mark.parametrize("kind", [AtFirst, ForOneCall, Last])
@pytest.mark.parametrize("verify", [True, False])
def test_calls_after_it_see_the_hooks(kind: Callable[[], nn.Module], verify: bool):
    model = kind()
    ported = tpuport.convert(copy.deepcopy(model), verify=verify)
    for call in range(3):
        x = normal(2, 4, seed=call)
        assert_same(ported(x), model(x), f"call {call}")


def test_a_module_of_a_script_has_the_hooks_afterwards():
    eager = AtFirst()
    ours = copy.deepcopy(eager)
    with tpuport.porting(eager=()):
        for call in range(3):
            x = normal(2, 4, seed=call)
            assert_same(ours(x), eager(x), f"call {call}")
    assert ours.ready
    assert (len(ours.layer._forward_hooks), len(ours.layer._forward_pre_hooks)) == (1, 1)
    assert_same(ours(normal(2, 4)), eager(normal(2, 4)), "without tpuport")


def test_hidden_states_of_hugging_face_models_are_there_at_each_call():
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.LlamaModel(config).eval()
    ported = tpuport.convert(copy.deepcopy(model))
    for call in range(3):
        ids = torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(call))
        given: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        asked = given | {"output_hidden_states": call != 1}
        with torch.no_grad():
            got, want = ported(**asked), model(**asked)
        assert (got.hidden_states is None) == (want.hidden_states is None) == (call == 1)
        for layer, (ours, theirs) in enumerate(
            zip(got.hidden_states or (), want.hidden_states or (), strict=True)
        ):
            assert_same(ours, theirs, f"call {call}, layer {layer}")


def test_hooks_that_are_others_at_each_call_are_refused():
    model = EachTime()
    ported = tpuport.convert(copy.deepcopy(model))

    def run() -> None:
        for call in range(20):
            assert_same(ported(normal(2, 4)), model(normal(2, 4)), f"call {call}", atol=1e-3)

    with pytest.raises(PortError, match=r"hooks of layer change on every call"):
        run()


class Holding(nn.Module):
    """Puts a hook on that holds something of the model."""

    def __init__(self, hook: Callable[["Holding"], Any]) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.hook = hook

    def scaled(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.layer._forward_hooks:
            self.layer.register_forward_hook(self.hook(self))
        return self.layer(x)


@pytest.mark.parametrize(
    "hook",
    [
        lambda model: model.scaled,
        lambda model: lambda module, args, out: out * model.scale,
        lambda model: lambda module, args, out, scale=model.scale: out * scale,
    ],
    ids=["method", "closure", "default"],
)
def test_a_hook_that_holds_what_is_traced_is_refused(hook: Any):
    ported = tpuport.convert(Holding(hook))
    with pytest.raises(PortError, match=r"put a hook .* on 'layer' that holds a module or a ten"):
        ported(normal(2, 4))


def test_a_handle_that_is_kept_is_refused():
    ported = tpuport.convert(Keeping())
    with pytest.raises(PortError, match="keeps the handle of a hook in 'handles'"):
        ported(normal(2, 4))


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_of_a_module_is_refused_when_a_gradient_is_taken(kind: str):
    def watch(module: nn.Module, *gradients: Any) -> None:
        raise AssertionError("called in the backward pass of eager PyTorch")

    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    getattr(model[1], kind)(watch)
    x = torch.ones(2, 3)
    ported = tpuport.convert(model)
    torch.testing.assert_close(tpuport.to_torch(ported(x)), model(x))
    ported = tpuport.convert(model, verify=False)

    def loss(params: Any) -> Any:
        return ported.apply(params, ported.buffers, None, x)[0].sum()

    with pytest.raises(tpuport.PortError, match="backward hook of ReLU sees") as refused:
        jax.grad(loss)(ported.params)
    assert refused.value.file == __file__
    assert refused.value.line == watch.__code__.co_firstlineno


def test_a_module_that_has_no_hash_is_refused_by_its_class():
    class Compared(nn.Linear):
        def __eq__(self, other: object) -> bool:
            return self is other

    with pytest.raises(tpuport.TpuportError, match="0 is of the class Compared, which defines"):
        tpuport.convert(nn.Sequential(Compared(3, 3)))
