"""Lists that loops fill which a traced value ends: as long as data says, equal to eager PyTorch."""

import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import tpuport
from tests.exactness.scenario import (
    Scenario,
    assert_same,
    by_tpuport,
    check_calls,
    check_gradients,
    normal,
)

# More than a call may have branches on one path.
ROUNDS = 16


class Decoder(nn.Module):
    """Makes tokens until all rows have ended; `limit` says where that is."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 4), nn.Linear(4, 5)
        self.kept: Any = None

    def step(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.cell(x + torch.tanh(h), h)
        return h, self.out(h) + h.sum() * 0.1


class Read(Decoder):
    """Most of what code does with such a list, in the loop and after it."""

    def forward(self, x: torch.Tensor, limit: torch.Tensor) -> Any:
        h, logits, rounds = torch.zeros(2, 4), [], torch.zeros(())
        for _ in range(ROUNDS):
            h, made = self.step(x, h)
            logits.append(made)
            rounds = rounds + 1
            if (rounds > limit).all():
                break
        second = self.reading(x, limit)
        length = len(logits)
        last = logits[-1] * 2 + logits[0]
        logits.append(last)
        return [
            *(torch.stack(logits, 1).sum(1), torch.cat(logits, 1).mean(1), last / length, length),
            *(torch.stack(logits[1:]).amax(0), torch.stack(logits[:-1]).sum(0), bool(logits)),
            *second,
        ]

    def reading(self, x: torch.Tensor, limit: torch.Tensor) -> list[torch.Tensor]:
        """Rounds that read the list, which has an item before them."""
        states, ids = [x * 0.5], []
        for _ in range(ROUNDS):
            h, made = self.step(x, states[-1])
            h = h + torch.stack(states, 1).mean(1) / len(states)
            states.append(h)
            ids.append(made.argmax(1))
            if torch.stack(ids, dim=1).ge(0).sum(1).gt(limit).all():
                break
        return [torch.stack(states).sum(0), torch.cat(ids).sum()]


LIMITS = [(normal(2, 4, seed=n), torch.tensor(float(n))) for n in (3, 0, 7, 99)]


def test_a_list_that_rounds_read_and_code_after_them() -> None:
    """It was refused: each length was a path of the program."""
    scenario = Scenario("read", Read, tuple(LIMITS), train=False)
    ported = check_calls(scenario, by_tpuport)
    assert not ported.report.retraces
    assert str(ported.report).count(f"one lax.scan of {ROUNDS} rounds") == 2


class Sums(nn.Module):
    """One number of what another module returns, for its gradient."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        made = [one for one in self.module(*given) if isinstance(one, torch.Tensor)]
        return sum((one * (i + 1)).sum() for i, one in enumerate(made) if one.is_floating_point())  # pyright: ignore[reportReturnType]


class Remembered(Decoder):
    """The state is the list's last item."""

    def forward(self, x: torch.Tensor, limit: torch.Tensor) -> Any:
        states = [x]
        for i in range(ROUNDS):
            states.append(self.cell(states[-1], states[0]) + torch.stack(states).mean(0))
            if limit <= i:
                break
        with torch.no_grad():
            stopped = torch.stack(states).sum(0)
        return [torch.cat(states).sum(0), states[-1] * states[0], stopped]


@pytest.mark.parametrize(
    ("kind", "call"), [(Read, LIMITS[0]), (Remembered, LIMITS[1]), (Remembered, LIMITS[3])]
)
def test_gradients(kind: type[nn.Module], call: tuple[torch.Tensor, ...]) -> None:
    check_gradients(Scenario("read", lambda: Sums(kind()), (call,), train=False), by_tpuport)


class Returned(Decoder):
    """The list itself is a result, and what is joined of it has its length."""

    rounds = 3

    def forward(self, x: torch.Tensor, limit: torch.Tensor) -> Any:
        h, logits = torch.zeros(2, 4), []
        for i in range(self.rounds):
            h, made = self.step(x, h)
            logits.append(made)
            if limit <= i:
                break
        return {"logits": logits, "joined": torch.stack(logits, 1)}


@pytest.mark.parametrize("rounds", [2, 3, ROUNDS])
def test_a_list_that_is_returned(rounds: int) -> None:
    kind = type("Returned", (Returned,), {"rounds": rounds})
    calls = tuple((x, limit) for x, limit in LIMITS if rounds > 2 or limit != 7)
    check_calls(Scenario("returned", kind, calls, train=False), by_tpuport)


class Odd(Decoder):
    """What such a list cannot show: few rounds are paths of the program, as before."""

    way, rounds = "", 4

    def forward(self, x: torch.Tensor, limit: torch.Tensor) -> Any:
        h, outs = torch.zeros(2, 4), []
        for i in range(self.rounds):
            h = self.cell(x, h)
            outs.append(h)
            if limit <= i:
                break
        return getattr(self, self.way)(h, outs)

    def iterated(self, h, outs):
        return sum(one * i for i, one in enumerate(outs)) + h

    def item_written(self, h, outs):
        outs[-1].mul_(2)
        return torch.stack(outs).sum(0), h

    def row_written(self, h, outs):
        first = outs[0]
        first += 1
        return torch.stack(outs).sum(0), outs[0] + h

    def state_written(self, h, outs):
        h.mul_(3)
        return torch.stack(outs).sum(0), outs[-1] * 1

    def replaced(self, h, outs):
        outs[-1] = h * 2
        return torch.stack(outs).mean(0)

    def popped(self, h, outs):
        last = outs.pop()
        return last + h, sum(outs, torch.zeros(2, 4))

    def of_another_size(self, h, outs):
        outs.append(h[:1])
        return torch.cat(outs).sum(0)

    def in_branches(self, h, outs):
        if h.sum() > 0:
            outs = outs[-1:]
        return torch.stack(outs).sum(0)

    def copied(self, h, outs):
        return torch.stack([h, *outs]).sum(0), torch.vstack(outs).sum(0)


WAYS = [name for name in vars(Odd) if name not in ("way", "rounds", "forward")]
WAYS = [name for name in WAYS if not name.startswith("__")]


@pytest.mark.parametrize("way", WAYS)
def test_what_such_a_list_cannot_show(way: str) -> None:
    calls = tuple((x, limit) for x, limit in LIMITS if limit != 7)
    check_calls(Scenario(way, type("Few", (Odd,), {"way": way}), calls, train=False), by_tpuport)


@pytest.mark.parametrize("way", ["iterated", "item_written", "replaced", "copied", "state_written"])
def test_it_is_refused_where_there_are_many_rounds(way: str) -> None:
    kind = type("Many", (Odd,), {"way": way, "rounds": ROUNDS})
    with pytest.raises(tpuport.PortError, match="a traced value ends, and whose tensors or lists"):
        tpuport.convert(kind().eval())(*LIMITS[0])


class Kept(Decoder):
    """The list is state after the call."""

    def forward(self, x: torch.Tensor, limit: torch.Tensor) -> Any:
        h, self.kept = torch.zeros(2, 4), []
        for i in range(ROUNDS):
            h = self.cell(x, h)
            self.kept.append(h * 1)
            if limit <= i:
                break
        return h


class Chosen(Decoder):
    """Some rounds append, and others do not."""

    def forward(self, x: torch.Tensor, limit: torch.Tensor) -> Any:
        h, outs = torch.zeros(2, 4), [x]
        for i in range(ROUNDS):
            h = self.cell(x, h)
            if h.sum() > 0:
                outs.append(h)
            if limit <= i:
                break
        return torch.stack(outs).sum(0)


class WrittenInRounds(Decoder):
    """A round writes to what it has appended."""

    def forward(self, x: torch.Tensor, limit: torch.Tensor) -> Any:
        h, outs = torch.zeros(2, 4), []
        for i in range(ROUNDS):
            h = self.cell(x, h)
            outs.append(h)
            h += 1
            outs[-1].mul_(1.5)
            if limit <= i:
                break
        return torch.stack(outs).sum(0)


@pytest.mark.parametrize("kind", [Kept, Chosen, WrittenInRounds])
def test_loops_that_do_more_are_refused_or_equal(kind: type[nn.Module]) -> None:
    try:
        check_calls(Scenario("more", kind, tuple(LIMITS), train=False), by_tpuport)
    except tpuport.PortError as error:
        assert __file__ in str(error)  # noqa: PT017


class Asked(Decoder):
    """What code may ask of such a list, and a branch after it."""

    def forward(self, x: torch.Tensor, limit: torch.Tensor) -> Any:
        h, start, outs = x * 1, x * 2, []
        outs.append(start)
        for i in range(ROUNDS):
            h = self.cell(x, h)
            outs.append(h)
            if limit <= i:
                break
        kinds = [type(outs) is list, outs.__class__ is list, isinstance(outs, list)]
        kinds += [type(outs).__name__, hasattr(outs, "shape"), hasattr(outs, "foo"), type(outs)()]
        kinds += [outs[-1] is h, outs[0] is start, outs is (outs or 1)]
        if h.sum() > 0:
            made = torch.stack(outs).sum(0)
        else:
            made = outs[-1] * 2
        second, outs = outs[1], outs[1:]
        outs.append(x)
        return [made, outs[-1] * 2, second * 1, torch.cat(outs).sum(0), *kinds]


def test_what_code_asks_of_such_a_list() -> None:
    check_calls(Scenario("asked", Asked, tuple(LIMITS), train=False), by_tpuport)


class Aliased(Decoder):
    """Another name for the list, where the loop does not reach it."""

    way = ""

    def forward(self, x: torch.Tensor, limit: torch.Tensor) -> Any:
        outs: list[torch.Tensor] = []
        other = getattr(self, self.way)(outs)
        for i in range(ROUNDS):
            outs.append(self.cell(x, x) * i)
            if limit <= i:
                break
        return x * other()

    def in_a_dict(self, outs):
        table = {"k": outs}
        return lambda: len(table["k"])

    def in_a_tuple(self, outs):
        pair = (outs, 1)
        return lambda: len(pair[0])

    def of_an_object(self, outs):
        made = types.SimpleNamespace(rows=outs)
        return lambda: len(made.rows)

    def as_a_default(self, outs):
        return lambda rows=outs: len(rows)

    def as_a_method(self, outs):
        return outs.__len__


@pytest.mark.parametrize(
    "way", [name for name in vars(Aliased) if name.startswith(("in_", "of_", "as_"))]
)
def test_other_names_for_the_list(way: str) -> None:
    """They had the list as it was before the loop: a silent difference."""
    kind = type("Named", (Aliased,), {"way": way})
    with pytest.raises(tpuport.PortError, match="other names"):
        tpuport.convert(kind().eval(), verify=False)(*LIMITS[0])


class Changed(Decoder):
    """Writes that the array of the rows does not have."""

    way = ""

    def forward(self, x: torch.Tensor, limit: torch.Tensor) -> Any:
        h, first, outs = x * 1, x * 2, []
        outs.append(first)
        for i in range(ROUNDS):
            h = self.cell(x, h) + outs[-1] * 0.5
            outs.append(h)
            if limit <= i:
                break
            if self.way == "in_rounds":
                outs[0].mul_(0.5)
        return getattr(self, self.way)(x, h, outs)

    def in_rounds(self, x, h, outs):
        return torch.stack(outs).sum(0)

    def before_an_append(self, x, h, outs):
        row = outs[1]
        outs.append(x)
        row += 1
        return torch.stack(outs).sum(0)

    def in_a_part(self, x, h, outs):
        row, part = outs[1], outs[1:]
        row += 1
        return torch.stack(part).sum(0)

    def in_a_branch(self, x, h, outs):
        if x.sum() > 0:
            outs.append(x)
        return torch.stack(outs).sum(0)

    def twice_returned(self, x, h, outs):
        return outs, outs

    def put_away(self, x, h, outs):
        self.kept = outs
        return h

    def added_to(self, x, h, outs):
        return len([x] + outs)  # noqa: RUF005

    def read_by_the_class(self, x, h, outs):
        return list.__getitem__(outs, 0)

    def mapped(self, x, h, outs):
        return _pytree.tree_map_only(torch.Tensor, torch.detach, outs)[-1]


CHANGES = [name for name in vars(Changed) if name not in ("way", "forward")]
CHANGES = [name for name in CHANGES if not name.startswith("__")]


@pytest.mark.parametrize("way", CHANGES)
def test_what_the_rows_do_not_have_is_refused(way: str) -> None:
    kind = type("Written", (Changed,), {"way": way})
    with pytest.raises(tpuport.PortError, match="a traced value ends"):
        tpuport.convert(kind().eval(), verify=False)(*LIMITS[0])


def written(device: str) -> list[torch.Tensor]:
    """What a caller has that writes to a row and appends."""
    torch.manual_seed(0)
    module = type("Many", (Returned,), {"rounds": ROUNDS})().to(device)
    with torch.no_grad():
        made = module(*(one.to(device) for one in LIMITS[0]))["logits"]
        assert type(made) is list
        made[0].mul_(2)
        made.append(made[0] * 3)
        return [one.cpu() for one in made]


def test_rows_that_are_returned_are_apart() -> None:
    want = written("cpu")
    with tpuport.porting():
        found = written("cuda")
    assert len(found) == len(want)
    for have, one in zip(found, want, strict=True):
        assert_same(have, one, "after a write")
