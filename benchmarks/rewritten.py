"""`python -m benchmarks.rewritten`: a check that `tpuport rewrite` preserves results.

Copies real code bases (pass the checkouts), rewrites one copy, and builds small models from both.
In eager PyTorch their results and gradients have to be equal bit for bit; the rewritten models are
then run by plain torchax under `jax.jit` and by `tpuport.convert`, which must find nothing left to
rewrite; and rewriting the rewritten copy must change nothing.

`torch.compile` is switched off in both copies (TORCHDYNAMO_DISABLE), since the fused kernels that
it makes for the CPU round differently. Packages that a step does not need are replaced by stubs, in
both copies alike; see `benchmarks.upstream_models`.
"""

import argparse
import contextlib
import copy
import io
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.upstream_models import SEED, UPSTREAM, Case, Results, Upstream, built

RTOL = 1e-4
REPOSITORY = Path(__file__).parents[1]


@dataclass
class Run:
    """The results of a case in one copy.

    Attributes:
        eager: Results and gradients (`grad <name>`) in eager PyTorch.
        plain: The same under plain torchax, of the rewritten copy only.
        ported: Results of `tpuport.convert`, of the rewritten copy only.
        live: Lines of the copy that `convert` had to rewrite.
        library: Lines of installed packages that it had to rewrite.
        worst: Largest relative error that `convert` found, with gradients.
        errors: Exception of each way that failed.
    """

    eager: Results = field(default_factory=dict)
    plain: Results = field(default_factory=dict)
    ported: Results = field(default_factory=dict)
    live: list[str] = field(default_factory=list)
    library: list[str] = field(default_factory=list)
    worst: float = 0.0
    errors: dict[str, str] = field(default_factory=dict)


# Running the models of one copy, in a separate process.


class Draws:
    """The random tensors of an eager run, to be replayed in the same order."""

    NAMES = ("randn", "randn_like", "randint")

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what the random functions of torch return."""
        eager = {name: getattr(torch, name) for name in self.NAMES}

        def recording(draw: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.kept.append(draw(*args, **kwargs))
                return self.kept[-1].clone()

            return call

        with self._replaced({name: recording(draw) for name, draw in eager.items()}):
            yield

    @contextmanager
    def replayed(self, place: Callable[[torch.Tensor], Any]) -> Iterator[None]:
        """Make the random functions of torch return the recorded tensors."""
        left = iter(self.kept)
        again = {name: lambda *_, **__: place(next(left)) for name in self.NAMES}
        with self._replaced(again):
            yield

    @contextmanager
    def _replaced(self, functions: dict[str, Callable[..., Any]]) -> Iterator[None]:
        kept = {name: getattr(torch, name) for name in functions}
        try:
            for name, function in functions.items():
                setattr(torch, name, function)
            yield
        finally:
            for name, function in kept.items():
                setattr(torch, name, function)


def run_eager(case: Case, draws: Draws) -> Results:
    """Return results and gradients in eager PyTorch."""
    call, inputs = built(case), case.inputs()
    torch.manual_seed(SEED)
    with draws.recorded():
        results = call(inputs)
    found = {name: value.detach().clone() for name, value in results.items()}
    if "loss" in results:
        results["loss"].backward()
        for name, parameter in call.named_parameters():
            if parameter.grad is not None:
                found[f"grad {name}"] = parameter.grad
    return found


def run_plain(case: Case, draws: Draws) -> Results:
    """Return results and gradients under `jax.jit` with plain torchax, for the same draws."""
    import jax
    import torchax

    call, environment = built(case), torchax.default_env()
    trained = {name for name, p in call.named_parameters() if p.requires_grad}
    states, pure = torchax.extract_jax(copy.deepcopy(call))
    inputs = environment.t2j_copy((case.inputs(),))
    weights = {name: value for name, value in states.items() if name in trained}

    def results(weights: Any, inputs: Any) -> Any:
        with draws.replayed(lambda t: environment.j2t_iso(environment.t2j_copy(t))):
            return pure({**states, **weights}, inputs)

    def loss(weights: Any, inputs: Any) -> Any:
        return results(weights, inputs)["loss"]

    with jax.default_matmul_precision("highest"):
        found = dict(jax.jit(results)(weights, inputs))
        if "loss" in found:
            gradients = jax.jit(jax.grad(loss))(weights, inputs)
            found |= {f"grad {name}": value for name, value in gradients.items()}
    return {name: environment.j2t_copy(value) for name, value in found.items()}


def run_ported(case: Case, run: Run) -> None:
    """Compute results under `tpuport.convert`, which compares with eager PyTorch itself."""
    import tpuport

    ported = tpuport.convert(built(case), rtol=RTOL)
    run.ported = tpuport.to_torch(ported(case.inputs()))
    if "loss" in run.eager:
        ported.verify(case.inputs())
    run.worst = max(parity.max_rel for parity in ported.report.parity)
    for rewrite in ported.report.rewrites:
        lines = run.library if "site-packages" in rewrite.file else run.live
        lines.append(f"{rewrite.code} {Path(rewrite.file).name}:{rewrite.line}")


def run_copy(upstream: Upstream, *, is_rewritten: bool, only: str) -> dict[str, Run]:
    """Run each case in the copy on `sys.path`."""
    warnings.simplefilter("ignore")
    upstream.prepare()
    found: dict[str, Run] = {}
    for case in upstream.cases:
        if only not in case.name:
            continue
        run = found[case.name] = Run()
        draws = Draws()
        with _errors(run, "eager"):
            run.eager = run_eager(case, draws)
        if is_rewritten and run.eager:
            with _errors(run, "plain"):
                run.plain = run_plain(case, draws)
            with _errors(run, "convert"):
                run_ported(case, run)
    return found


@contextmanager
def _errors(run: Run, way: str) -> Iterator[None]:
    """Store what a way to run the model raises, for the table."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        run.errors[way] = f"{type(error).__name__}: {' '.join(lines[:3])}"
        if os.environ.get("TRACEBACKS"):
            import traceback

            traceback.print_exc()


# Making the copies and comparing what they compute.


def copied(checkout: Path, upstream: Upstream, folder: Path) -> list[Path]:
    """Copy the packages of a checkout to another folder, and return their paths."""
    made: list[Path] = []
    for root, package in upstream.packages:
        target = folder / root / package
        shutil.copytree(
            checkout / root / package, target, ignore=shutil.ignore_patterns("__pycache__")
        )
        made.append(target)
    return made


def rewrite_into(folder: Path, upstream: Upstream, out: Path) -> str:
    """Rewrite the packages of one folder into another, and return the last line of output."""
    packages = [str(Path(root) / package) for root, package in upstream.packages]
    program = "from tpuport.cli.app import app; app()"
    options = ["--isolated", "--no-cache", "--severity", "error", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", program, "rewrite", *options, *packages],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 2:
        raise SystemExit(done.stdout + done.stderr)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def differing(first: Path, second: Path) -> list[str]:
    """Return the files of a folder that differ from those in the other."""
    return [
        str(path.relative_to(first))
        for path in sorted(first.rglob("*.py"))
        if path.read_bytes() != (second / path.relative_to(first)).read_bytes()
    ]


def run_in(folder: Path, name: str, *, is_rewritten: bool, only: str) -> dict[str, Run]:
    """Run the models of a copy in another process."""
    roots = [str(folder / root) for root, _ in UPSTREAM[name].packages]
    results = folder / "results.pt"
    command = [sys.executable, "-m", "benchmarks.rewritten", "--run", name, "--only", only]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*roots, str(REPOSITORY)]),
        "TORCHDYNAMO_DISABLE": "1",
        "JAX_PLATFORMS": "cpu",
    }
    subprocess.run(
        [*command, "--results", str(results), *(["--rewritten"] if is_rewritten else [])],
        env=environment,
        cwd=folder,
        check=True,
    )
    return {case: Run(**found) for case, found in torch.load(results).items()}


def equal(expected: Results, got: Results, rtol: float) -> str:
    """Return `equal`, the relative error if within tolerance, or a difference after `!`."""
    if expected.keys() != got.keys():
        return f"! has {sorted(expected.keys() ^ got.keys())[:3]} in one only"
    largest = max((float(expected[n].abs().max()) for n in expected if _is_gradient(n)), default=0)
    errors: dict[str, float] = {}
    for name, tensor in expected.items():
        # A gradient that is zero except for rounding, as that of a key's bias, cannot be the
        # reference.
        least = 1e-3 * largest if _is_gradient(name) else 1e-6
        errors[name] = _error(tensor, got[name], least)
    where = max(errors, key=lambda name: errors[name])
    if errors[where] > rtol:
        return f"! {where} differs by {errors[where]:.1e}"
    return f"{errors[where]:.1e}" if errors[where] else "equal"


def _is_gradient(name: str) -> bool:
    return name.startswith("grad ")


def _error(expected: torch.Tensor, got: torch.Tensor, least: float) -> float:
    """Return the largest difference, relative to the largest element; inf for NaN."""
    if expected.shape != got.shape:
        return float("inf")
    if torch.equal(expected, got):
        return 0.0
    expected, got = expected.double(), got.double()
    error = (expected - got).abs().max() / expected.abs().max().clamp(min=max(least, 1e-30))
    return float("inf") if error.isnan() else float(error)


def verdict(case: Case, original: Run, rewritten: Run) -> dict[str, str]:
    """Return the table's cells of a case, by column."""
    errors = {f"{way}": f"! {error}" for way, error in rewritten.errors.items()}
    if "eager" in original.errors:
        errors["eager"] = f"! the original: {original.errors['eager']}"
    cells = {"eager": errors.get("eager") or equal(original.eager, rewritten.eager, case.close)}
    if not original.eager or not rewritten.eager:
        return cells
    cells["gradients"] = str(sum(map(_is_gradient, original.eager)) or "")
    # JAX returns zeros as the gradient of an unused parameter, PyTorch None.
    plain = {n: t for n, t in rewritten.plain.items() if n in original.eager or t.any()}
    cells["plain torchax"] = errors.get("plain") or equal(original.eager, plain, RTOL)
    if "convert" in errors:
        cells["convert"] = errors["convert"]
    elif rewritten.live:
        cells["convert"] = f"! rewrote {', '.join(rewritten.live)}"
    else:
        library = f" (rewrote in packages: {', '.join(rewritten.library)})"
        cells["convert"] = f"{rewritten.worst:.1e}{library if rewritten.library else ''}"
        results = {n: t for n, t in original.eager.items() if not _is_gradient(n)}
        if not case.is_random and (said := equal(results, rewritten.ported, RTOL))[0] == "!":
            cells["convert"] = said
    return cells


def compare(name: str, checkout: Path, only: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of the table for one code base."""
    upstream = UPSTREAM[name]
    with tempfile.TemporaryDirectory() as temporary:
        before, after, again = (Path(temporary, part) for part in ("before", "after", "again"))
        copied(checkout, upstream, before)
        said = rewrite_into(before, upstream, after)
        said_again = rewrite_into(after, upstream, again)
        changed = differing(after, again)
        yield (
            upstream.commit,
            {
                "": said.partition(": ")[2],
                "again": f"! {', '.join(changed)}: {said_again}" if changed else "no change",
            },
        )
        original = run_in(before, name, is_rewritten=False, only=only)
        rewritten = run_in(after, name, is_rewritten=True, only=only)
        for case in upstream.cases:
            if case.name in original:
                yield case.name, verdict(case, original[case.name], rewritten[case.name])


def show(rows: Iterable[tuple[str, dict[str, str]]]) -> int:
    """Print the rows as they come, and return the number of wrong cells."""
    wrong = 0
    for name, cells in rows:
        print(name)
        for column, cell in cells.items():
            if cell:
                wrong += cell.startswith("!")
                print(f"    {column + ':':<15} {cell}", flush=True)
    return wrong


def main() -> None:
    """Print the table; exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewritten", description=__doc__)
    for name, upstream in UPSTREAM.items():
        parser.add_argument(f"--{name}", type=Path, help=f"checkout of {upstream.commit}")
    parser.add_argument("--only", default="", help="run the cases with this in their names")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--rewritten", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    if options["run"] is not None:
        found = run_copy(
            UPSTREAM[options["run"]], is_rewritten=options["rewritten"], only=options["only"]
        )
        torch.save({case: vars(run) for case, run in found.items()}, options["results"])
        return
    wrong = 0
    for name in UPSTREAM:
        if options[name] is not None:
            wrong += show(compare(name, options[name].resolve(), options["only"]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
