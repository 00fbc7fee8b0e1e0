"""Views at places that data decides, and views of windows that overlap: writes through them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients

# Each takes a tensor [6, 2], a number or tensor below 2, and x [2].
BODIES: dict[str, Callable[..., Any]] = {
    "op": lambda out, t, x: out[t].add_(x),
    "slice": lambda out, t, x: out[t : t + 1].mul_(x),
    "some": lambda out, t, x: out[:t].add_(x),
    "steps": lambda out, t, x: out[t::2].add_(x),
    "inner": lambda out, t, x: out[t][0].add_(x[1]),
    "last": lambda out, t, x: out[..., t].add_(x[0]),
    "row": lambda out, t, x: out[t].__setitem__(0, x[1]),
    "out": lambda out, t, x: torch.mul(x.detach(), 2, out=out.detach()[t]),
    "copy": lambda out, t, x: out[t].copy_(x),
    "turned": lambda out, t, x: out.T[t].add_(x[0]),
    "flat": lambda out, t, x: out.view(-1)[t].add_(x[0]),
    "masked": lambda out, t, x: out[t].masked_fill_(x > 1, 7.0),
    "windows": lambda out, t, x: out.unfold(0, 2, 1)[t].add_(x[0]),
    "strided": lambda out, t, x: out.view(-1).as_strided((4, 3), (2, 1))[t].mul_(x[0]),
    "a window": lambda out, t, x: out.view(-1).unfold(0, 4, 2)[1, 3].copy_(x[0]),
    "windows in windows": lambda out, t, x: (
        out.view(-1).unfold(0, 6, 2)[1].unfold(0, 3, 1)[1].add_(x[1])
    ),
}


def kept(out: torch.Tensor, t: Any, x: torch.Tensor) -> Any:
    """What is taken is a second name of what is written later."""
    row = out[t]
    out.mul_(3)
    out[1] = x
    return row * 2


def swapped(out: torch.Tensor, t: Any, x: torch.Tensor) -> Any:
    row = out[t]
    out[t] = out[1] + x
    out[2] = row
    row += 1
    return row * 2


class Written(nn.Module):
    """Calls one function, or all, each on a tensor that is a constant, and on one that is not."""

    def __init__(self, bodies: list[Callable[..., Any]], *, as_tensor: bool) -> None:
        super().__init__()
        self.bodies, self.as_tensor = bodies, as_tensor
        self.weight = nn.Parameter(torch.tensor([0.5, 1.5]))

    def forward(self, x: torch.Tensor) -> list[Any]:
        """Return the tensors, and what is returned of them."""
        t, x = x.argmax(), x * self.weight
        number = t if self.as_tensor else int(t)
        found = []
        for body in self.bodies:
            for out in (torch.arange(12.0).view(6, 2) * 0.5, torch.ones(6, 2) * x):
                made = body(out, number, x)
                found += [made, out] if body in (kept, swapped) else [out]
        return found


CALLS = tuple((torch.tensor(x),) for x in ([1.0, 2.0], [2.0, 1.0], [0.5, 3.0]))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_write_reaches_what_the_view_is_of(as_tensor: bool) -> None:
    """Those to a part of a constant were lost, and so were those to one window of several."""
    bodies = [*BODIES.values(), kept, swapped]
    scenario = Scenario("places", lambda: Written(bodies, as_tensor=as_tensor), CALLS)
    check_calls(scenario, by_tpuport)
    check_gradients(scenario, by_tpuport)


class Rounds(nn.Module):
    """A loop that is one of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.9, 1.1]))

    def forward(self, x: torch.Tensor) -> Any:
        """Return what the rounds have written, and a view from before them."""
        out, found = torch.full((40, 2), 0.5), torch.zeros(40, 2)
        view = out[0]
        for t in range(40):
            x = torch.tanh(x * self.weight)
            out[t].mul_(x)
            found[t][0] = x[1]
            found[t].add_(out[t])
        return out, view, found


def test_a_loop_writes_to_rows() -> None:
    scenario = Scenario("rounds", Rounds, CALLS)
    ported = check_calls(scenario, by_tpuport)
    assert "one lax.scan of 40 rounds" in str(ported.report)
    check_gradients(scenario, by_tpuport)


with torch.inference_mode():
    TABLE = torch.arange(12.0).view(6, 2)


class Inferred(nn.Module):
    """Takes rows of tensors that were made in inference mode, whose writes torch does not count."""

    @torch.inference_mode()
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return a row of a table, and a tensor to which one was added."""
        t, out = x.argmax(), torch.full((6, 2), 0.5)
        row = TABLE[t] * x
        out[t].add_(row)
        return [row, out]


def test_rows_of_tensors_of_inference_mode() -> None:
    check_calls(Scenario("inferred", Inferred, CALLS), by_tpuport)
