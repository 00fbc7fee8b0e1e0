"""Graphs of `torch.fx` and programs of `torch.export` and `torch.compile` as what is converted."""

import io

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients, normal
from tpuport.foundation.errors import PortError

# `torch.export.unflatten` warns of itself.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")

CALLS = tuple((normal(n, 3, seed=n),) for n in (5, 5, 4))
ROWS = ({0: torch.export.Dim("rows", min=2, max=64)},)


class State(nn.Module):
    """A shared layer, buffers that a call changes, and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.tied = self.first
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.ones(3), persistent=False)

    def forward(self, x):
        self.calls.add_(1)
        y = self.tied(torch.relu(self.norm(self.first(x)))) * self.calls
        return {"y": y + self.shift, "z": (x.sum(0), torch.tensor([1.0, 2.0, 3.0]) * x[0])}


class Regions(nn.Module):
    """What `torch.export` keeps as an operator on a graph."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        with torch.no_grad():
            y = self.first(x).sigmoid()
        with torch.autocast("cpu", torch.bfloat16):
            z = self.second(x)
        return self.first(x) * y, z.float(), y.max().int().item()


def exported(module, **options):
    return torch.export.export(module, CALLS[0], dynamic_shapes=ROWS, **options)


def reloaded(module):
    file = io.BytesIO()
    torch.export.save(exported(module), file)
    file.seek(0)
    return torch.export.load(file).module()


SCENARIOS = [
    Scenario("traced", lambda: torch.fx.symbolic_trace(State()), CALLS),
    Scenario("exported", lambda: exported(State()).module(), CALLS),
    Scenario("reloaded", lambda: reloaded(State()), CALLS[:2], grads=False),
    Scenario("flat", lambda: torch.export.unflatten(exported(State())), CALLS[:2], grads=False),
    Scenario(
        "inside",
        lambda: nn.Sequential(nn.Linear(3, 3), exported(State()).module()),
        CALLS[:2],
        grads=False,
    ),
    Scenario("regions", lambda: exported(Regions()).module(), CALLS, rtol=2e-2),
]


def built(scenario):
    module = scenario.build
    # An exported program has no modes.
    return Scenario(**{**vars(scenario), "build": lambda: _without_modes(module())})


def _without_modes(module):
    module.train = lambda mode=True: module
    return module


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_values_and_buffers(scenario):
    check_calls(built(scenario), by_tpuport)


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.grads], ids=str)
def test_gradients(scenario):
    check_gradients(built(scenario), by_tpuport)


def test_what_cannot_be_called_is_ported_as_what_can():
    module = State().eval()
    program = exported(module)
    compiled = torch.compile(module, backend="eager")
    for target in (program, compiled):
        ported = tpuport.convert(target)
        for (x,) in CALLS[1:]:
            y = ported(x)["y"].torch()
            assert set(ported.params) == {"first.weight", "first.bias", "norm.weight", "norm.bias"}
            torch.testing.assert_close(
                y,
                module.tied(module.norm(module.first(x)).relu()) * ported.buffers["calls"].item()
                + 1,
            )


def test_a_guard_of_an_exported_program_is_kept():
    ported = tpuport.convert(exported(State()))
    with pytest.raises(AssertionError, match=r"Guard failed: x.size\(\)\[1\] == 3"):
        ported(torch.randn(5, 4))


def test_a_graph_that_a_pass_has_changed():
    class Gelu(nn.Module):
        def forward(self, x):
            return torch.relu(x) * x

    graph = torch.fx.symbolic_trace(Gelu())
    for node in graph.graph.nodes:
        if node.target is torch.relu:
            node.target = F.gelu
    graph.recompile()
    (x,) = CALLS[0]
    torch.testing.assert_close(tpuport.convert(graph)(x).torch(), F.gelu(x) * x)


class Written(nn.Module):
    """Control flow as Python has it: eager `torch.cond` needs dynamo, which torchax breaks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.more, self.less = (
            torch.fx.symbolic_trace(f) for f in (lambda x: x * 2, lambda x: x.sin())
        )

    def forward(self, x):
        y = self.first(x) * 2 if x.sum() > 0 else self.second(x) - 1
        y = self.more(y) if x.shape[0] > 4 else self.less(y)
        return y if x[0, 0] > 0 else -y


class Operators(Written):
    def forward(self, x):
        cond = torch.ops.higher_order.cond
        y = torch.cond(x.sum() > 0, lambda x: self.first(x) * 2, lambda x: self.second(x) - 1, (x,))
        y = cond(x.shape[0] > 4, self.more, self.less, (y,))
        return cond(x[0, 0] > 0, lambda y: y.clone(), lambda y: -y, (y,))


def test_branches_that_are_operators():
    torch.manual_seed(0)
    written, operators = Written(), Operators()
    operators.load_state_dict(written.state_dict())
    ported = tpuport.convert(operators, verify=False)
    calls = [sign * x for (x,) in CALLS for sign in (1, -1)]
    for x in calls:
        torch.testing.assert_close(ported(x).torch(), written(x))
    for x in calls[:2]:

        def total(params, x=x):
            return ported.apply(params, {}, jax.random.key(0), x)[0].sum()

        grads = jax.jit(jax.grad(total))(ported.params)
        want = torch.autograd.grad(written(x).sum(), list(written.parameters()), allow_unused=True)
        for (name, parameter), grad in zip(written.named_parameters(), want, strict=True):
            grad = torch.zeros_like(parameter) if grad is None else grad
            torch.testing.assert_close(tpuport.to_torch(grads[name]), grad, msg=name)


def test_loops_that_are_operators():
    def written(x, n):
        i, y = torch.tensor(0), x
        while (i < n) and (y.abs().max() < 3):
            i, y = i + 1, y * 1.5
        return i, y

    def operator(x, n):
        def test(i, y, n):
            return (i < n) & (y.abs().max() < 3)

        start = (torch.tensor(0), x)
        return torch.ops.higher_order.while_loop(
            test, lambda i, y, n: (i + 1, y * 1.5), start, (n,)
        )

    ported = tpuport.convert(operator, verify=False)
    for (x,) in CALLS:
        for n in (0, 2, 9):
            got = tpuport.to_torch(ported(x, torch.tensor(n)))
            torch.testing.assert_close(got, written(x, torch.tensor(n)))


def test_an_operator_on_functions_without_an_equivalent_is_refused():
    from torch._higher_order_ops.map import map as torch_map

    with pytest.raises(PortError, match=r"higher_order\.map.* has no equivalent") as caught:
        tpuport.convert(lambda x: torch_map(lambda row: row * 2, x), verify=False)(CALLS[0][0])
    assert "test_graphs.py" in str(caught.value)
