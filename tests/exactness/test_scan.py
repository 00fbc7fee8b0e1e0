"""`scan`: one program for all rounds, equal in value and gradient to the Python loop."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError, UsageError
from tpuport.model.scanning import scan
from tpuport.training import make_train_step


class Recurrent(nn.Module):
    """A cell over time with a queue of integers beside it."""

    def __init__(self, *, remat: bool = False, stop: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 4)
        self.remat, self.stop = remat, stop

    def round(self, carry: dict[str, torch.Tensor], x: Any) -> tuple[Any, Any]:
        value, flag = x
        before = carry["h"].detach() if self.stop else carry["h"]
        h = torch.tanh(self.inner(value) + self.outer(before))
        queue = torch.cat([carry["queue"][1:], flag[None]])
        return {"h": h, "queue": queue}, (h.sum(-1), queue.float().mean())

    def forward(self, x: torch.Tensor, flags: torch.Tensor) -> Any:
        carry = {"h": x.new_zeros(x.shape[1], 4), "queue": torch.zeros(3, dtype=torch.uint8)}
        last, (sums, means) = scan(self.round, carry, (x, flags), remat=self.remat)
        return last, sums, means


X, FLAGS = torch.linspace(-1, 1, 30).reshape(5, 2, 3), torch.arange(5, dtype=torch.uint8)


def test_eager_is_the_loop():
    model = Recurrent()
    last, sums, means = model(X, FLAGS)
    h = torch.zeros(2, 4)
    for number in range(5):
        h = torch.tanh(model.inner(X[number]) + model.outer(h))
        torch.testing.assert_close(sums[number], h.sum(-1))
    torch.testing.assert_close(last["h"], h)
    assert last["queue"].tolist() == [2, 3, 4]
    assert last["queue"].dtype == torch.uint8
    assert means.tolist() == [0.0, pytest.approx(1 / 3), 1.0, 2.0, 3.0]


def loss(model: Recurrent, batch: Any) -> torch.Tensor:
    last, sums, means = model(batch["x"], batch["flags"])
    return (sums * means[:, None]).square().mean() + last["h"].square().sum()


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"stop": True}])
def test_a_program_is_the_loop_in_value_and_gradient(options: dict[str, bool]):
    eager, model = Recurrent(**options), Recurrent(**options)
    expected = loss(eager, {"x": X, "flags": FLAGS})
    expected.backward()
    step = make_train_step(tpuport.convert(model, verify=False), loss, optax.sgd(0.1))
    state, metrics = step(step.init(), {"x": X, "flags": FLAGS})
    np.testing.assert_allclose(float(metrics["loss"]), expected.item(), rtol=1e-5)
    for name, parameter in eager.named_parameters():
        moved = (parameter.detach().numpy() - np.asarray(state.params[name])) / 0.1
        assert parameter.grad is not None
        np.testing.assert_allclose(moved, parameter.grad.numpy(), rtol=1e-3, atol=1e-5)


def test_outputs_of_a_program_and_one_trace_of_the_body():
    model = Recurrent()
    ported = tpuport.convert(model, verify=False)
    found = tpuport.to_torch(ported(X, FLAGS))
    expected = model(X, FLAGS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    closed = jax.make_jaxpr(lambda p, x, f: ported.apply(p, {}, None, x, f)[0])(
        ported.params, np.asarray(X), np.asarray(FLAGS)
    )
    assert sum(eqn.primitive.name == "scan" for eqn in closed.jaxpr.eqns) == 1


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def body(carry: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if self.kind == "write":
                self.count += 1
            if self.kind == "draw":
                value = value + torch.rand(2)
            if self.kind == "dtype":
                return (carry + value).double(), value
            return carry + value, value

        return scan(body, torch.zeros(2), x)[0]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("write", "writes to tensors that it did not make, or draws random numbers"),
        ("draw", "or draws random numbers"),
        ("dtype", "carries .* into a round and .* out of it"),
    ],
)
def test_what_a_body_must_not_do_is_refused(kind: str, said: str):
    with pytest.raises(PortError, match=said):
        tpuport.convert(Odd(kind), verify=False)(torch.ones(3, 2))


def test_rounds_that_differ_are_refused():
    with pytest.raises(UsageError, match=r"of \[2, 3\] rounds"):
        scan(lambda carry, x: (carry, x), torch.zeros(1), (torch.zeros(2), torch.zeros(3)))
    with pytest.raises(UsageError, match=r"of \[0\] rounds: expected one number, above 0"):
        scan(lambda carry, x: (carry, x), torch.zeros(1), torch.zeros(0, 2))


@pytest.mark.parametrize("remat", [False, True])
def test_a_check_in_a_round(remat: bool):
    table = torch.arange(12.0).reshape(4, 3)

    def total(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        def body(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return carry + table[row], carry

        return scan(body, x, rows, remat=remat)[0]

    ported = tpuport.convert(total)
    for _ in range(2):
        got = tpuport.to_torch(ported(torch.ones(3), torch.tensor([0, -1, 3])))
        np.testing.assert_array_equal(got, total(torch.ones(3), torch.tensor([0, -1, 3])))
        with pytest.raises(IndexError, match="expected -4 <= index < 4"):
            ported(torch.ones(3), torch.tensor([0, 4, 1]))
