"""The demo on the terminal: the failure of plain torchax, the port, and their comparison."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tpuport.demo.models import DemoModel, make_planner, make_video_transformer
from tpuport.demo.page import to_page
from tpuport.demo.plain_torchax import failure_of
from tpuport.demo.planner import BatchFeature
from tpuport.foundation.reporting.markup import plural
from tpuport.model.convert import convert
from tpuport.model.ported_model import PortedModel
from tpuport.reports.report import PortReport
from tpuport.reports.text import WIDTH
from tpuport.reports.wording import number

_REPEATS = 7


@dataclass
class ToldModel:
    """What the demo found for one model.

    Attributes:
        title: The model.
        report: The report of its port.
        sound: Whether the other checks passed: the model is unchanged, noise is fresh.
        brief: The lines that stay when the rest is left out: whether it is good, and a text.
    """

    title: str
    report: PortReport
    sound: bool
    brief: list[tuple[bool, str]]


def run(
    *,
    out: Path,
    console: Console | None = None,
    verbose: bool = False,
    as_json: bool = False,
) -> bool:
    """Port both models, print the story, and write their reports to one HTML page.

    Args:
        out: The file to write the page to.
        console: The console to print to; the terminal by default.
        verbose: Whether to print all of it, before the lines that are always printed.
        as_json: Whether to print what was found as JSON, and nothing else.

    Returns:
        Whether outputs, gradients and buffers of both ports agree with eager PyTorch, the noise is
        fresh in each call, and the models are unchanged.
    """
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    start = time.perf_counter()
    shown, console = console, Console(quiet=True) if as_json else console
    console.print(Text("Two PyTorch models, ported to JAX without editing them", style="bold"))
    results = [
        _tell(console, make_video_transformer, _video_speed, seed_matters=False, verbose=verbose),
        _tell(console, make_planner, _planner_speed, seed_matters=True, verbose=verbose),
    ]
    out.write_text(to_page([one.report for one in results]), encoding="utf-8")
    agrees = all(one.report.ok and one.sound for one in results)
    if verbose:
        console.rule(style="dim")
    for one in results:
        console.print(Text(one.title, style="bold"))
        for good, text in one.brief:
            _line(console, good, text)
    verdict = "Both ports agree with eager PyTorch" if agrees else "A port differs: see above"
    seconds = time.perf_counter() - start
    console.print(Text(f"{verdict}. {seconds:.0f} s in all; reports in {out}", style="bold"))
    if not verbose:
        console.print(Text("All of it: tpuport demo -v", style="dim"))
    if as_json:
        shown.print(_as_json(results, agrees, out), soft_wrap=True, markup=False, highlight=False)
    return agrees


def _as_json(results: list[ToldModel], agrees: bool, out: Path) -> str:
    models = [
        {"model": one.title, "agrees": one.report.ok, "sound": one.sound}
        | {"lines": [text for _, text in one.brief]}
        for one in results
    ]
    return json.dumps({"agrees": agrees, "page": str(out), "models": models}, indent=1)


def _tell(
    console: Console,
    make: Callable[[], DemoModel],
    speed: Callable[[DemoModel, PortedModel], tuple[str, float]],
    *,
    seed_matters: bool,
    verbose: bool,
) -> ToldModel:
    """Print one model's chapter, or only work on it, and return what was found."""
    with _working(console, "making a model"):
        example = make()
    if not verbose:
        with console.status(Text(example.title, style="dim")):
            return _told(Console(quiet=True), example, speed, seed_matters)
    return _told(console, example, speed, seed_matters)


def _told(
    console: Console,
    example: DemoModel,
    speed: Callable[[DemoModel, PortedModel], tuple[str, float]],
    seed_matters: bool,
) -> ToldModel:
    console.print()
    console.rule(Text(example.title, style="bold"), align="left")
    console.print(Text(example.story, style="dim"))
    brief = [_tell_plain(console, example)]
    before = {name: value.clone() for name, value in example.model.state_dict().items()}
    ported = _port(console, example)
    console.print(Padding(ported.report, (1, 0, 0, 2)))
    _heading(console, "In short")
    untouched = _is_unchanged(example.model, before)
    _line(console, untouched, "the model, its class and its weights are unchanged")
    brief.append(_tell_parity(console, ported.report))
    fresh = not seed_matters or _tell_noise(console, example, ported)
    with _working(console, "timing the jitted step against eager PyTorch"):
        what, ratio = speed(example, ported)
    speed_line = f"{what} takes {ratio:.2f}x the time of eager PyTorch on this CPU"
    _line(console, True, speed_line)
    sound = untouched and fresh
    brief.append(
        (sound, "model unchanged" + (", fresh noise in each call" if seed_matters else ""))
    )
    return ToldModel(example.title, ported.report, sound, [*brief, (True, speed_line)])


def _tell_plain(console: Console, example: DemoModel) -> tuple[bool, str]:
    """Print what plain torchax does with a model, and return it in a line."""
    failures = 0
    _heading(console, "Plain torchax, the same model under jax.jit")
    for name in example.methods:
        with _working(console, f"running {name} on plain torchax"):
            failure = failure_of(
                example.model,
                lambda model, inputs: example.call(model, name, inputs),  # noqa: B023
                example.inputs,
            )
        if failure is None:
            _line(console, True, f"{name} runs")
            continue
        failures += 1
        _line(console, False, f"{name}: {failure.error}")
        console.print(Text(f"      {failure.place}   {failure.source}", style="cyan"))
    with _working(console, "looking for silent differences of plain torchax"):
        differences = example.differences(example)
    table = Table("No error, but", "eager", "plain torchax", box=None, padding=(0, 3, 0, 0))
    for one in differences:
        table.add_row(
            one.what, one.eager, Text(one.plain, "red" if one.plain != one.eager else "green")
        )
    console.print(Padding(table, (1, 0, 0, 4)))
    silent = sum(one.plain != one.eager for one in differences)
    what = (
        f"plain torchax: {failures} of {plural(len(example.methods), 'method')} stop with an error"
    )
    return not failures + silent, f"{what}, {plural(silent, 'result')} silently different"


def _port(console: Console, example: DemoModel) -> PortedModel:
    """Port a model and compare each method, and the gradients, with eager PyTorch."""
    _heading(console, "tpuport.convert(model)")
    start = time.perf_counter()
    with _working(console, "tracing, compiling and comparing outputs with eager PyTorch"):
        ported = convert(example.model, methods=example.methods)
        example.call(ported)
    with _working(console, "comparing gradients"):
        args, kwargs = example.bind(example.inputs)
        ported.verify(*args, **kwargs)
    for name in [name for name in example.methods if name != "forward"]:
        with _working(console, f"porting {name}"):
            ported.eval()
            example.call(ported, name)
            ported.train(example.model.training)
    _line(console, True, f"ported and compared in {time.perf_counter() - start:.0f} s")
    return ported


def _tell_parity(console: Console, report: PortReport) -> tuple[bool, str]:
    """Print how well a port agrees, and return it in a line."""
    counts, worst = [], 0.0
    for kind in ("output", "gradient", "buffer"):
        found = [parity for parity in report.parity if parity.kind == kind]
        # A value that is zero up to rounding was checked by an absolute limit: its relative
        # error means nothing.
        sizable = [one.max_rel for one in found if one.max_rel <= one.tolerance or not one.ok]
        if sizable:
            what = f"{plural(len(found), kind)} as in eager PyTorch"
            ok = all(one.ok for one in found)
            _line(console, ok, f"{what}; worst relative error {number(max(sizable))}")
            counts.append(plural(len(found), kind))
            worst = max(worst, *sizable)
    agree = f"{', '.join(counts)} as in eager PyTorch; worst relative error {number(worst)}"
    return report.ok, agree


def _tell_noise(console: Console, example: DemoModel, ported: PortedModel) -> bool:
    """Print and return whether two calls differ and the same seed repeats them."""

    def plans() -> list[torch.Tensor]:
        return [example.call(ported, "get_action").plan.torch() for _ in range(2)]

    ported.eval()
    torch.manual_seed(1)
    first, second = plans()
    torch.manual_seed(1)
    again, _ = plans()
    fresh, repeats = not torch.equal(first, second), torch.equal(first, again)
    _line(console, fresh, "each call of the jitted sampler draws fresh noise")
    _line(console, repeats, "torch.manual_seed repeats it")
    return fresh and repeats


def _video_speed(example: DemoModel, ported: PortedModel) -> tuple[str, float]:
    def jitted() -> None:
        jax.block_until_ready(example.call(ported).sample.jax())

    def eager() -> None:
        with torch.no_grad():
            example.call(example.model)

    return "the jitted forward", _ratio(jitted, eager)


def _planner_speed(example: DemoModel, ported: PortedModel) -> tuple[str, float]:
    ported.train()
    arrays = {name: jax.numpy.asarray(value.numpy()) for name, value in example.inputs.items()}

    def loss(params: Any, buffers: Any, key: jax.Array, arrays: Any) -> Any:
        out, buffers = ported.apply(params, buffers, key, BatchFeature(arrays))
        return out.loss, buffers

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    key = jax.random.key(0)

    def jitted() -> None:
        jax.block_until_ready(step(ported.params, ported.buffers, key, arrays))

    def eager() -> None:
        example.model.zero_grad()
        example.call(example.model).loss.backward()

    return "a jitted training step (loss, gradients, buffers)", _ratio(jitted, eager)


def _ratio(ours: Callable[[], None], theirs: Callable[[], None]) -> float:
    """Return the ratio of median times; the calls alternate so that machine load affects both."""
    times: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    for function in times:
        function()
    for _ in range(_REPEATS):
        for function, seconds in times.items():
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return statistics.median(times[ours]) / statistics.median(times[theirs])


def _is_unchanged(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    return after.keys() == before.keys() and all(
        torch.equal(before[name], after[name]) for name in after
    )


@contextmanager
def _working(console: Console, what: str) -> Iterator[None]:
    """Show a spinner while the block runs, if the output is a terminal."""
    with console.status(Text(what, style="dim")):
        yield


def _heading(console: Console, text: str) -> None:
    console.print(Padding(Text(text, style="bold"), (1, 0, 0, 0)))


def _line(console: Console, good: bool, text: str) -> None:
    mark, style = ("✔", "green") if good else ("✘", "red")
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text(mark, style), Text(text))
    console.print(Padding(grid, (0, 0, 0, 2)))
