"""Loops on the host under `porting()` whose calls get longer: one program for many lengths."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tpuport
from tpuport.compat.emulated import call_lengths
from tpuport.compat.emulated.programs import PortWarning
from tpuport.tracing.state.lengths import Lengths, Seen, Steps, series


@dataclass
class Cache:
    """A cache that a call makes longer in place, and counts."""

    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    seen: int = 0

    def add(self, name: str, x: torch.Tensor) -> torch.Tensor:
        known = self.kept.get(name)
        self.kept[name] = x if known is None else torch.cat([known, x], 1)
        return self.kept[name]


class Decoder(torch.nn.Module):
    """A decoder with a table of 40 positions in memory, and a cache that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.places = torch.nn.Linear(4, 4), torch.nn.Embedding(40, 4)
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(1, 40, 4))

    def forward(
        self, x: torch.Tensor, cache: Cache, mask: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, Cache]:
        n = x.shape[1]
        x = x + self.places.weight[start : start + n]
        self.table[:, start : start + n] = self.lin(x)
        keys, values = self.table[:, : start + n], cache.add("values", x)
        cache.seen += n
        scores = (x @ keys.transpose(1, 2)).masked_fill(~mask[:, None], -1e9)
        if n > 1:
            scores = scores.masked_fill(torch.ones(n, n, device=x.device).triu(1).bool(), -1e9)
        return torch.softmax(scores, -1) @ values / (1 + cache.seen), cache


def decoded(model: Any, device: str, lengths: tuple[int, ...], rounds: int) -> list[torch.Tensor]:
    """Run a sampler's loop, which calls `forward` itself, for prompts of some lengths."""
    found = []
    for length in lengths:
        x = torch.arange(4.0 * length).reshape(1, length, 4).sin().to(device)
        cache, mask, start = Cache(), torch.ones(1, length, dtype=torch.bool).to(device), 0
        y = x
        with torch.inference_mode():
            for _ in range(rounds):
                y, cache = model.forward(x, cache, mask, start)
                start, x = start + x.shape[1], y[:, -1:]
                mask = torch.cat([mask, mask[:, :1]], 1)
        found += [y.cpu(), cache.kept["values"].cpu(), torch.tensor(cache.seen)]
    return [*found, model.table.cpu()]


def both(make: Any, run: Any) -> Any:
    """Return the report of the one program of a run, whose results equal eager PyTorch's."""
    (report,) = compared(make, run).programs
    return report


def compared(make: Any, run: Any) -> Any:
    """Return the report of a run, whose results equal eager PyTorch's."""
    torch.manual_seed(0)
    eager = make()
    expected = run(eager, "cpu")
    with tpuport.porting() as scope:
        model = make().cuda()
        model.load_state_dict(eager.state_dict())
        if isinstance(model, Decoder):
            model.table.zero_()
        given = run(model, "cuda")
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    return scope.report


def test_a_loop_on_the_host_has_one_program_for_its_steps() -> None:
    report = both(Decoder, lambda m, device: decoded(m, device, (3, 3), 14))
    # The prompt, the first step, and all others.
    assert len(report.retraces) == 2, report.retraces
    assert not report.notes


def test_longer_calls_have_one_program_for_twice_the_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_lengths, "_SHORTEST", 8)
    report = both(Decoder, lambda m, device: decoded(m, device, (3,), 20))
    # The prompt, the first step, up to 8, up to 16 and up to 32.
    assert len(report.retraces) == 4, report.retraces


class Written(Decoder):
    """It writes to a part of its cache in place."""

    def forward(self, x: torch.Tensor, cache: Cache, mask: torch.Tensor, start: int) -> Any:
        if "values" in cache.kept:
            cache.kept["values"][:, :1] += 1
        return super().forward(x, cache, mask, start)


def test_what_is_not_one_program_has_one_for_each_length() -> None:
    report = both(Written, lambda m, device: decoded(m, device, (3,), 4))
    assert len(report.retraces) >= 3
    assert any("writes to an argument that is longer at each call" in n for n in report.notes)


class Shifting(torch.nn.Module):
    """A layer with idioms of samplers: heads by -1, a shift, padding to a size, masks in place."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)
        self.table: torch.Tensor
        self.register_buffer("table", torch.arange(12)[None, :, None] % 3 == 0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.lin(x)
        n = y.shape[1]
        y.masked_fill_(self.table[:, :n], 0.5)
        heads = y.view(1, n, -1, 2).transpose(1, 2)
        scores = heads @ heads.mT
        i, j = scores.shape[-2:]
        hidden = torch.ones(i, j, device=x.device).triu_(j - i + 1).bool()
        seen = scores.masked_fill_(hidden, -1e9).softmax(-1) @ heads
        last = F.pad(y, (0, 0, 6 - n, 0), value=2.0)  # the last six of them
        return seen, F.pad(y, (0, 0, 1, -1)) - y, last


def test_idioms_of_samplers_have_one_program_for_all_lengths() -> None:
    eager = Shifting()
    with tpuport.porting() as scope, torch.no_grad():
        model = Shifting().cuda()
        model.load_state_dict(eager.state_dict())
        for length in (3, 4, 5, 6, 7, 11):
            x = torch.randn(1, length, 4)
            for ours, theirs in zip(model(x.cuda()), eager(x), strict=True):
                torch.testing.assert_close(ours.cpu(), theirs)
    (report,) = scope.report.programs
    assert len(report.retraces) == 1
    assert not report.notes


class Noisy(Decoder):
    """It draws as many numbers as its cache is long."""

    def forward(self, x: torch.Tensor, cache: Cache, mask: torch.Tensor, start: int) -> Any:
        y, cache = super().forward(x, cache, mask, start)
        noise = torch.rand_like(cache.kept["values"])
        return y + noise.gt(2).sum(), cache


def test_draws_are_made_for_each_length() -> None:
    report = both(Noisy, lambda m, device: decoded(m, device, (3,), 4))
    assert any("draws random numbers" in n for n in report.notes)


def test_a_number_that_no_code_reads_makes_no_program() -> None:
    class Labelled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
            return self.lin(x)

    with tpuport.porting() as scope, torch.no_grad():
        model = Labelled().cuda()
        for step in range(4):
            model(torch.ones(1, 2).cuda(), step)
    assert not scope.report.programs[0].retraces


class Hooked(torch.nn.Module):
    """A decoder whose cache is filled by hooks, as Whisper's is."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.by_closure = True

    def forward(self, x: torch.Tensor, cache: dict[Any, torch.Tensor]) -> torch.Tensor:
        key = self.key(x) if "fixed" not in cache else cache["fixed"]
        return self.out(torch.softmax(x @ key.transpose(1, 2), -1) @ key)


def filled_by_hooks(model: Any, device: str) -> list[torch.Tensor]:
    """Run two loops with a cache and hooks of their own, the second from a longer prompt."""
    made = []
    for length in (1, 2):
        cache: dict[Any, torch.Tensor] = {}

        def keep(module: Any, given: Any, output: torch.Tensor, cache: Any = cache) -> Any:
            return _kept(cache, module, output)

        def kept(module: Any, given: Any, output: torch.Tensor) -> Any:
            return _kept(cache, module, output)  # noqa: B023 - the loop removes it

        handle = model.key.register_forward_hook(kept if model.by_closure else keep)
        with torch.no_grad():
            for i in range(5):
                size = length if i == 0 else 1
                x = torch.arange(4.0 * size).reshape(1, size, 4).sin().to(device) * (i + 1)
                made.append(model(x, cache).cpu())
        handle.remove()
        assert list(cache) == [model.key]
        made.append(cache[model.key].cpu())
    return made


def _kept(cache: dict[Any, torch.Tensor], module: Any, output: torch.Tensor) -> torch.Tensor:
    known = cache.get(module)
    cache[module] = output if known is None else torch.cat([known, output], dim=1)
    return cache[module]


def test_a_cache_that_hooks_hold_and_fill_is_an_argument_of_one_program() -> None:
    found = compared(Hooked, filled_by_hooks)
    (report,) = found.programs
    # The first call, one step, many steps; then a longer prompt.
    assert report.model == "Hooked"
    assert len(report.retraces) == 3
    assert not found.descended


def test_what_hooks_hold_in_another_way_is_not_tied_to_an_argument() -> None:
    def by_defaults() -> Hooked:
        model = Hooked()
        model.by_closure = False
        return model

    with (
        pytest.warns(PortWarning, match="a hook of key holds an argument"),
        pytest.warns(PortWarning, match="default values"),
    ):
        compared(by_defaults, filled_by_hooks)


class Keyed(Hooked):
    """A decoder that fills a cache whose keys are its layers."""

    def forward(self, x: torch.Tensor, cache: dict[Any, torch.Tensor]) -> torch.Tensor:
        key = self.key(x)
        if self.key in cache:
            key = torch.cat([cache[self.key], key], 1)
        cache[self.key] = key
        return self.out(torch.softmax(x @ key.transpose(1, 2), -1) @ key)


def test_a_cache_whose_keys_are_layers() -> None:
    def run(model: Any, device: str) -> torch.Tensor:
        cache: dict[Any, torch.Tensor] = {}
        with torch.no_grad():
            made = [model(torch.ones(1, 1, 4).to(device) * i, cache).cpu() for i in range(5)]
        assert list(cache) == [model.key]
        return torch.cat([*made, cache[model.key].cpu()], 1)

    assert len(both(Keyed, run).retraces) == 2


def test_a_hook_that_writes_to_what_its_closure_holds_is_refused() -> None:
    layer, seen = torch.nn.Linear(2, 2), {}

    def keep(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        seen["y"] = output + seen.get("y", 0)
        return seen["y"]

    layer.register_forward_hook(keep)
    for held in ({}, {"y": torch.ones(1, 2)}):
        seen.clear()
        seen.update(held)
        with torch.no_grad(), pytest.raises(tpuport.PortError, match="TPU406"):
            tpuport.convert(layer)(torch.ones(1, 2))
        assert list(seen) == list(held)


def test_what_two_calls_have_in_common() -> None:
    found = series(Seen(((1, 7), (1, 7, 7)), (7, "'a'")), Seen(((1, 9), (1, 9, 9)), (11, "'a'")))
    assert found is not None
    assert dict(found.sizes) == {(0, 1): Steps(9, 1), (1, 1): Steps(9, 1), (1, 2): Steps(9, 1)}
    assert dict(found.numbers) == {0: Steps(11, 2)}
    wide = Lengths(found.first, found.sizes, found.numbers, -5, 5)
    assert wide.count(Seen(((1, 8), (1, 8, 8)), (9, "'a'"))) == -1
    assert wide.largest(1) == (1, 14, 14)
    for other in (
        Seen(((1, 8), (1, 8, 8)), (10, "'a'")),  # the number is another one
        Seen(((2, 8), (1, 8, 8)), (9, "'a'")),
        Seen(((1, 8), (1, 8, 8)), (9, "'b'")),
        Seen(((1, 90), (1, 90, 90)), (173, "'a'")),
    ):
        assert wide.count(other) is None
    # One is longer and one shorter, or a text changes.
    assert series(Seen(((1, 7), (7,)), ()), Seen(((1, 9), (6,)), ())) is None
    assert series(Seen(((7,),), ("'a'",)), Seen(((9,),), ("'b'",))) is None
    assert series(Seen(((7,),), ()), Seen(((7,),), ())) is None
    # Shorter calls are no series: a step after its prompt.
    assert series(Seen(((1, 9),), ()), Seen(((1, 7),), ())) is None
    # A batch.
    assert series(Seen(((1, 7),), ()), Seen(((2, 7),), ())) is None
