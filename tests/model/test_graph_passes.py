"""`passes=`: functions of FX graphs, judged by the original module."""

import copy
import operator
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import tpuport
from tpuport.foundation.errors import ParityError, PortError, UsageError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.0))
        self.out = nn.Linear(4, 4)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        h = self.layers(x)
        h = F.relu(self.out(h)) + torch.relu(h) * self.calls
        return {"y": h * torch.sigmoid(h) * scale}


def relu_as_clamp(graph: fx.GraphModule) -> fx.GraphModule:
    """One op for another, in place."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in (F.relu, torch.relu):
            node.target, node.args, node.kwargs = torch.clamp_min, (node.args[0], 0.0), {}
    return graph


def silu_kernel(graph: fx.GraphModule) -> None:
    """A pattern for a kernel, by `torch.fx.replace_pattern`."""
    found = fx.replace_pattern(graph, lambda h: h * torch.sigmoid(h), lambda h: F.silu(h))
    assert found


def without_dropout(graph: fx.GraphModule) -> fx.GraphModule:
    """A submodule that goes away, and a new one without parameters."""
    graph.add_submodule("same", nn.Identity())
    for node in graph.graph.nodes:
        if node.op == "call_module" and isinstance(graph.get_submodule(node.target), nn.Dropout):
            node.target = "same"
    graph.delete_all_unused_submodules()
    return fx.GraphModule(graph, graph.graph)


def wrong(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if node.target is torch.sigmoid:
            node.target = torch.tanh


def broken(graph: fx.GraphModule) -> None:
    add = next(n for n in graph.graph.nodes if n.target is operator.mul)
    add.args = (add, add)


def _batch(seed: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


PASSES = (relu_as_clamp, silu_kernel, without_dropout)


def test_passes_leave_values_state_gradients_and_the_module() -> None:
    torch.manual_seed(0)
    model = Net()
    seen: list[str] = []

    def look(graph: fx.GraphModule) -> None:
        seen.append(graph.code)

    eager, ported = copy.deepcopy(model), tpuport.convert(model, passes=[*PASSES, look])
    for seed in range(3):
        got = tpuport.to_torch(ported(_batch(seed), scale=2.0))["y"]
        torch.testing.assert_close(got, eager(_batch(seed))["y"].detach())
    assert "silu" in seen[0]
    assert "clamp_min" in seen[0]
    assert "self.same" in seen[0]
    assert ported.params.keys() == dict(model.named_parameters()).keys()
    for name, buffer in eager.named_buffers():
        got = tpuport.to_torch(ported.buffers[name])
        torch.testing.assert_close(got, buffer, check_dtype=False)
    assert isinstance(model.layers[3], nn.Dropout)
    assert not model.calls.any()

    twin = copy.deepcopy(eager)
    twin(_batch(9))["y"].sum().backward()

    def total(params: Any) -> jax.Array:
        return ported.apply(params, ported.buffers, jax.random.key(0), _batch(9))[0]["y"].sum()

    for name, grad in jax.jit(jax.grad(total))(ported.params).items():
        want = twin.get_parameter(name).grad
        # The pass rounds differently (silu for a product), and gradients are sums over a batch.
        # That of the bias before the batch norm is rounding only.
        torch.testing.assert_close(tpuport.to_torch(grad), want, rtol=1e-5, atol=1e-4)
    # The graph is captured again in the other mode.
    ported.module.eval()
    got = tpuport.to_torch(ported(_batch(3), scale=2.0))["y"]
    torch.testing.assert_close(got, eager.eval()(_batch(3))["y"].detach())


def aten_silu(graph: fx.GraphModule) -> None:
    ops = torch.ops.aten
    found = fx.replace_pattern(
        graph, lambda h: ops.mul.Tensor(h, ops.sigmoid.default(h)), lambda h: ops.silu.default(h)
    )
    assert found


def test_the_graph_of_an_exported_program_has_aten_operations() -> None:
    torch.manual_seed(0)
    program = torch.export.export(Net().eval(), (_batch(0),))
    ported = tpuport.convert(program, passes=[aten_silu])
    eager = program.module()
    for seed in range(2):
        got = tpuport.to_torch(ported(_batch(seed)))["y"]
        torch.testing.assert_close(got, eager(_batch(seed))["y"].detach())


def gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x) + 1


def test_a_function_has_a_graph_too() -> None:
    ported = tpuport.convert(gate, passes=[silu_kernel])
    torch.testing.assert_close(tpuport.to_torch(ported(_batch(0))), gate(_batch(0)))


def test_a_wrong_pass_differs_from_the_original() -> None:
    with pytest.raises(ParityError):
        tpuport.convert(Net(), passes=[wrong])(_batch(0))


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


class Remembers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return x + 1


@pytest.mark.parametrize(
    ("module", "line"), [(Branches, "if x.sum() > 0:"), (Remembers, "def forward(self")]
)
def test_what_has_no_graph_is_refused(module: type[nn.Module], line: str) -> None:
    with pytest.raises(PortError, match="TPU409") as caught:
        tpuport.convert(module(), passes=[silu_kernel])(_batch(0))
    assert line in str(caught.value)


def _weighted(graph: fx.GraphModule) -> None:
    graph.weight = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (lambda graph: graph.graph, "returned a Graph"),
        (broken, "the pass broken made a broken graph"),
        (_weighted, "adds the parameters weight"),
    ],
)
def test_a_pass_that_makes_no_graph_is_refused(one: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        tpuport.convert(Net(), passes=[one])(_batch(0))
