"""Functions that a module keeps: their closures and default values hold its state and parts."""

import copy
import functools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.pytree.clone import clone_module


class Keeper:
    """An object that keeps what layers return, by hooks that hold its dict."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def watch(self, layer: nn.Module, name: str) -> None:
        found = self.found

        def keep(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            found[name] = out

        layer.register_forward_hook(keep)


class Watched(nn.Module):
    """A module whose hooks fill a list, dicts and the dict of an object, which it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.seen: list[torch.Tensor] = []
        self.sums: dict[str, torch.Tensor] = {}
        self.keeper, self.shared = Keeper(), {}
        self.layers[0].register_forward_hook(lambda m, a, out, seen=self.seen: seen.append(out))
        self.keeper.watch(self.layers[1], "one")
        sums = self.sums

        def add(m: nn.Module, a: Any, out: torch.Tensor, *, of: Any = self.sums) -> None:
            of["new"] = sums.get("old", torch.zeros(())) + out.sum()
            sums["old"] = of["new"].detach()

        self.layers[2].register_forward_hook(add)
        got = self.shared

        def put(m: nn.Module, a: Any, out: torch.Tensor) -> None:
            got["last"] = out

        self.read = lambda: got["last"]
        self.layers[3].register_forward_hook(put)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.seen.clear()
        outs = [layer(x) for layer in self.layers]
        kept = self.keeper.found.pop("one")
        return outs[0] * self.seen[0], outs[1] * kept, self.sums["new"], outs[3] + self.read()


class Bound(nn.Module):
    """A module with functions whose default values are its layers, a weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("count", torch.zeros(()))
        self.steps = [lambda x, layer=layer: torch.tanh(layer(x)) for layer in self.layers]

        def counted(x: torch.Tensor, *, count: torch.Tensor = self.count) -> torch.Tensor:
            count.add_(1.0)
            return x * count

        self.counted = counted
        # A module that moves gets other buffers, while a default value stays what it was.
        self.is_moved = False
        self.layers[1].register_forward_hook(lambda m, a, out, scale=self.scale: out * scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x)
        return x if self.is_moved else self.counted(x)


class Both(nn.Module):
    """A module of both kinds, so that one program has all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.watched, self.bound = Watched(), Bound()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *self.watched(x), self.bound(x)


def made() -> Both:
    torch.manual_seed(0)
    return Both()


def loss_of(outs: Any) -> Any:
    return sum((out * out).sum() for out in outs)


INPUTS = [torch.tensor(np.arange(6) * k % 7 / 4 - 0.7).float().view(2, 3) for k in (3, 5, 9)]


def test_a_converted_module_has_functions_on_its_own_state():
    eager, ported = made(), tpuport.convert(made())
    start = {name: np.asarray(value) for name, value in ported.params.items()}
    buffers = dict(ported.buffers)
    for x in INPUTS:
        for have, want in zip(ported(x), eager(x), strict=True):
            torch.testing.assert_close(tpuport.to_torch(have), want.detach())
    assert float(ported.buffers["bound.count"]) == 3
    again = made()
    loss_of(again(INPUTS[0])).backward()
    fresh = tpuport.convert(made())

    def loss(params: Any) -> jax.Array:
        return loss_of(fresh.apply(params, buffers, None, jnp.asarray(INPUTS[0].numpy()))[0])

    slopes = jax.jit(jax.grad(loss))(start)
    for name, weight in again.named_parameters():
        np.testing.assert_allclose(slopes[name], weight.grad, 1e-4, 1e-5, err_msg=name)


# What a hook keeps beside the module's attributes is seen as outside of it from the second call on,
# so that the layers are programs by themselves.
@pytest.mark.filterwarnings("ignore:.* is not one program")
def test_a_script_trains_a_module_with_such_functions():
    def trained(device: str) -> list[torch.Tensor]:
        model = made().to(device)
        model.bound.is_moved = True
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        losses = []
        for x in INPUTS:
            loss = loss_of(model(x.to(device)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return [value.detach().cpu() for value in (*losses, *model.state_dict().values())]

    with tpuport.porting():
        have = trained("cuda")
    torch.testing.assert_close(have, trained("cpu"), rtol=1e-4, atol=1e-5)


def test_copies_of_functions_are_made_only_where_they_lead_to_the_module():
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, beside = {"a": 1}, {"a": 1}
            table = self.table
            self.act, self.free = torch.relu, lambda x: x * beside["a"]
            self.own, self.by_default = lambda: table, lambda table=table: table
            self.of_a_part = functools.partial(lambda held: held, table)
            self.named, self.softmax = copy.copy, nn.functional.softmax
            self.parents = [weakref.proxy(nn.Identity())]  # of what is deleted at once

    module = Held()
    made, _ = clone_module(module, torch.clone)
    for name in ("act", "free", "named", "softmax"):
        assert getattr(made, name) is getattr(module, name)
    assert made.table is not module.table
    for name in ("own", "by_default", "of_a_part"):
        assert getattr(made, name)() is made.table
        assert getattr(module, name)() is module.table
