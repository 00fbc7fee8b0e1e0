"""Samplers under `porting()` that loop over sizes, seed a generator, and take a number."""

import types
from typing import Any

import pytest
import torch

import tpuport
from tpuport.compat.emulated.growing_methods import looping_methods


class Scales(torch.nn.Module):
    """A sampler of scales, each from the ones before, with a cache and a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = (1, 2, 3)
        self.lin, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 5)
        self.table = torch.nn.Embedding(5, 4)
        self.rng = torch.Generator(device=self.lin.weight.device)
        self.kept: torch.Tensor | None = None

    @torch.no_grad()
    def sample(self, start: torch.Tensor, seed: int | None) -> torch.Tensor:
        rng = None if seed is None else self.rng.manual_seed(seed)
        self.kept, made = None, torch.zeros(len(start), 4, 3, 3, device=start.device)
        x = start[:, None]
        for i, n in enumerate(self.sizes):
            y = self.lin(x)
            kept = self.kept = y if self.kept is None else torch.cat([self.kept, y], 1)
            y = torch.softmax(y @ kept.transpose(1, 2), -1) @ kept
            odds = torch.softmax(self.head(y) * 3, -1).view(-1, 5)
            found = torch.multinomial(odds, 1, generator=rng)
            grid = self.table(found).transpose(1, 2).reshape(len(start), 4, n, n)
            made = made + torch.nn.functional.interpolate(grid, (3, 3))
            if i + 1 < len(self.sizes):
                n = self.sizes[i + 1]
                x = torch.nn.functional.interpolate(made, (n, n)).flatten(2).transpose(1, 2)
        self.kept = None
        return made

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x).view(-1, 4)
        return x


def test_a_loop_over_sizes_of_the_module_is_one_program() -> None:
    assert looping_methods(Scales) == (["sample"], [])
    with tpuport.porting() as scope:
        model = Scales().cuda()
        start = torch.randn(2, 4).cuda()
        made = [model.sample(start, seed).cpu() for seed in (1, 2, 7, 1, 300)]
        free = [model.sample(start, None).cpu() for _ in range(2)]
    # Each first call of a program is compared with eager PyTorch, which draws the same numbers.
    (report,) = scope.report.programs
    assert report.ok
    assert report.model == "Scales"
    # The first seed, seeds up to 64, seeds up to 512, and none.
    assert len(report.retraces) == 3
    assert torch.equal(made[0], made[3])
    assert not torch.equal(made[0], made[1])
    assert not torch.equal(free[0], free[1])
    assert model.kept is None


class Unseeded(Scales):
    """It draws from a generator that nobody has seeded in the call."""

    def drawn(self, x: torch.Tensor) -> torch.Tensor:
        odds = torch.softmax(self.lin(x), -1)
        return torch.multinomial(odds, 1, generator=self.rng)


class Asking(Scales):
    """It keeps the state of the generator."""

    def drawn(self, x: torch.Tensor) -> torch.Tensor:
        self.rng.manual_seed(3)
        state = self.rng.get_state()
        y = self.lin(x) + torch.rand(4, generator=self.rng)
        self.rng.set_state(state)
        return y + torch.rand(4, generator=self.rng)


@pytest.mark.parametrize("kind", [Unseeded, Asking])
def test_a_generator_that_is_used_in_another_way_is_refused(kind: type[Any]) -> None:
    ported = tpuport.convert(kind(), methods=("drawn",))
    with pytest.raises(tpuport.PortError):
        ported.drawn(torch.randn(2, 4))


def test_seeding_in_a_call_leaves_the_generator_of_the_caller() -> None:
    model = Scales()
    before = model.rng.get_state()
    ported = tpuport.convert(model, methods=("sample",))
    one, two = (tpuport.to_torch(ported.sample(torch.ones(2, 4), 3)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(model.rng.get_state(), before)


class Timed(torch.nn.Module):
    """A network that takes a step as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, step: int, total: int) -> torch.Tensor:
        return self.drop(self.lin(x) * (step / total)) + step


def test_steps_that_count_down_have_one_program() -> None:
    torch.manual_seed(0)
    eager = Timed().eval()
    with tpuport.porting() as scope:
        model = Timed().cuda().eval()
        model.load_state_dict(eager.state_dict())
        x = torch.ones(2, 4)
        with torch.no_grad():
            for step in range(900, -1, -180):
                torch.testing.assert_close(model(x.cuda(), step, 1000).cpu(), eager(x, step, 1000))
            model.train()
            drawn = [model(x.cuda(), step, 1000).cpu() for step in (300, 200, 100)]
    assert len(scope.report.programs[0].retraces) <= 4
    assert all(len(one.unique()) > 1 for one in drawn)


class Rows(torch.nn.Module):
    """A network of rows, of which each call has another number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.SiLU(), torch.nn.LayerNorm(4)
        )

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        half = x[: len(x) // 2]
        return self.net(torch.cat([half, half]) * t[:, None].cos()) + x.mean()


def test_calls_with_three_numbers_of_rows_have_one_program_for_more() -> None:
    torch.manual_seed(0)
    eager = Rows()
    with tpuport.porting() as scope, torch.no_grad():
        model = Rows().cuda()
        model.load_state_dict(eager.state_dict())
        for count in (6, 12, 20, 26, 30, 8, 2, 32, 12):
            x, t = torch.randn(count, 4), torch.arange(count)
            torch.testing.assert_close(model(x.cuda(), t.cuda()).cpu(), eager(x, t))
    (report,) = scope.report.programs
    # 6, 12, and up to 32.
    assert len(report.retraces) == 2, report.retraces


def test_two_sizes_of_batches_have_a_program_each() -> None:
    with tpuport.porting() as scope, torch.no_grad():
        model = Rows().cuda()
        for count in (8, 8, 6):
            model(torch.ones(count, 4).cuda(), torch.arange(count).cuda())
    (retrace,) = scope.report.programs[0].retraces
    assert retrace.causes[0].endswith("float32[6, 4]")


def test_a_method_whose_loop_cannot_be_traced_runs_as_it_is_written() -> None:
    class Printed(Scales):
        def sample(self, start: torch.Tensor, seed: int | None) -> torch.Tensor:
            made = start
            for n in self.sizes:
                made = self.lin(made).view(-1, 4).repeat(n, 1)
                if float(made.detach().sum()) > 1e6:
                    print(made.tolist())  # noqa: T201 - the trace cannot know whether it does
            return made

    torch.manual_seed(0)
    eager = Printed()
    with tpuport.porting() as scope:
        model = Printed().cuda()
        model.load_state_dict(eager.state_dict())
        made = model.sample(torch.ones(1, 4).cuda(), None)
    torch.testing.assert_close(made.cpu(), eager.sample(torch.ones(1, 4), None))
    assert scope.report.programs


class Hub:
    """A mixin that takes options where a class is defined, as huggingface_hub's does."""

    card: str

    def __init_subclass__(cls, *, card: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.card = card


def test_a_class_with_options_may_be_defined_in_a_block() -> None:
    with tpuport.porting() as scope:

        class Inside(torch.nn.Module, Hub, card="inside"):
            def __init__(self) -> None:
                super().__init__()
                self.by = torch.nn.Parameter(torch.full((2,), 2.0))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.by

            def twice(self, x: torch.Tensor) -> torch.Tensor:
                return self.forward(self.forward(x))

        with pytest.raises(TypeError, match="keyword arguments"):
            types.new_class("Without", (torch.nn.Module,), {"card": "nobody takes it"})
        x = torch.ones(2).cuda()
        model = Inside().cuda()
        made = [model(x).cpu(), model.twice(x).cpu()]
    assert [y.tolist() for y in made] == [[2.0, 2.0], [4.0, 4.0]]
    assert scope.report.programs

    class Outside(Inside, card="outside"):
        pass

    assert (Inside.card, Outside.card) == ("inside", "outside")
