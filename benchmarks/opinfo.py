"""PyTorch's own database of operators, run through `convert`: values and gradients of all samples.

`torch.testing._internal` has sample inputs for each operator. Each sample is computed by eager
PyTorch in float32 and in float64, and by a port. The port may be as far from float64 as eager is,
times a factor. Write docs/opinfo.md with `python -m benchmarks.opinfo`.
"""

import argparse
import contextlib
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tpuport
from tpuport.foundation import pytree
from tpuport.foundation.errors import ParityError, TpuportError
from tpuport.foundation.interop import backend

PAGE = Path(__file__).parent.parent / "docs" / "opinfo.md"
# How much farther from float64 than eager a port may be, and what is no distance at all.
FACTOR, NOISE = 8.0, 2e-5
_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool, torch.int32)
_EMPTY = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_"
    " resize_as_".split()
)


# What may become of a sample, worst first. A parity error is what the port's own comparison raised.
# Of "not run" nothing was compared: eager PyTorch refuses the sample, or no dtype is ours.
KINDS = ("wrong value", "wrong gradient", "crash", "parity error", "refused", "passes", "not run")


@dataclass(frozen=True)
class Finding:
    """What became of one sample.

    Attributes:
        kind: one of `KINDS`.
        reason: what a refusal says, what differs, or why nothing was compared.
        sample: the sample's number.
    """

    kind: str
    reason: str
    sample: int


@dataclass
class Outcome:
    """What became of an operator's samples."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """Return the worst that happened; "not run" if no sample was compared."""
        found = {finding.kind for finding in self.findings}
        return next((kind for kind in KINDS if kind in found), "not run")


def database() -> list[Any]:
    """Return PyTorch's entries."""
    # Importing them forbids to set flags of torch.backends in this process.
    flag = "__allow_nonbracketed_mutation_flag"
    held = torch.backends.disable_global_flags.__globals__
    before = held[flag]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    held[flag] = before
    return list(op_db)


def full_name(entry: Any) -> str:
    """Return an entry's name, with its variant."""
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


def run(entry: Any, most: int | None = None) -> Outcome:
    """Run the samples of one entry.

    Args:
        entry: an entry of the database.
        most: the number of samples, spread over all of them; None for all.
    """
    outcome = Outcome(full_name(entry))
    supported = entry.supported_dtypes("cpu")
    dtype = next((d for d in _DTYPES if d in supported), None)
    if dtype is None:
        outcome.findings.append(Finding("not run", f"dtypes {supported or 'none'} on CPU", 0))
        return outcome
    grad = dtype.is_floating_point and entry.supports_autograd
    torch.manual_seed(0)
    samples = list(entry.sample_inputs("cpu", dtype, requires_grad=grad))
    step = 1 if most is None else max(1, -(-len(samples) // most))
    for index in range(0, len(samples), step):
        with _quiet():
            found = _Sample(entry, samples[index], index).run()
        outcome.findings.append(found)
    return outcome


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Draws(TorchDispatchMode):
    """A mode that notes whether an operator draws random numbers."""

    draws = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _Sample:
    """One sample: its function, its arguments, and the comparison."""

    def __init__(self, entry: Any, sample: Any, index: int) -> None:
        self.entry, self.index = entry, index
        self.process = sample.output_process_fn_grad
        given = (sample.input, tuple(sample.args), dict(sample.kwargs))
        self.leaves, self.spec = pytree.flatten(given)

    def function(self, *leaves: torch.Tensor) -> Any:
        """Apply the operator to these tensors, in the places of the sample's own."""
        first, args, kwargs = pytree.unflatten(self.spec, list(leaves))
        return self.process(self.entry.op(first, *args, **kwargs))

    def run(self) -> Finding:
        """Compute it in every way, and compare."""
        try:
            reference = self._eager(torch.float32)
        except Exception as error:
            return Finding("not run", f"eager refuses: {type(error).__name__}", self.index)
        try:
            self._compare(reference)
        except ParityError as error:
            return Finding("parity error", str(error)[:60], self.index)
        except TpuportError as error:
            return Finding("refused", _refusal(error), self.index)
        except _Different as error:
            return Finding(error.kind, str(error), self.index)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            return Finding(
                "crash", f"{type(error).__name__}: {str(error)[:90]} ({where})", self.index
            )
        return Finding("passes", "", self.index)

    def _given(self, dtype: torch.dtype) -> list[Any]:
        wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
        made = []
        for leaf in self.leaves:
            if isinstance(leaf, torch.Generator):
                made.append(leaf)
                continue
            one = leaf.detach().clone()
            if dtype is torch.float64:
                one = one.to(wide.get(one.dtype, one.dtype))
            made.append(one.requires_grad_(leaf.requires_grad))
        return made

    def _eager(self, dtype: torch.dtype) -> tuple[list[Any], dict[int, Any]]:
        """Return eager's outputs, and the gradients by the number of the leaf."""
        given = self._given(dtype)
        torch.manual_seed(1)
        out = self.function(*given)
        outs = pytree.flatten(out)[0]
        total = sum(_projected(o, i) for i, o in enumerate(outs) if _flows(o))
        wanted = [i for i, leaf in enumerate(given) if _wants(leaf)]
        grads: dict[int, Any] = {}
        if isinstance(total, torch.Tensor) and wanted:
            found = torch.autograd.grad(total, [given[i] for i in wanted], allow_unused=True)
            grads = dict(zip(wanted, found, strict=True))
        return outs, grads

    def _compare(self, reference: tuple[list[Any], dict[int, Any]]) -> None:
        expected, grads = reference
        if self._is_random():
            # The comparison of the package itself draws the same numbers for both.
            tpuport.convert(self.function)(*self._given(torch.float32))
            return
        ported = tpuport.convert(self.function, verify=False)
        got = pytree.flatten(ported(*self._given(torch.float32)))[0]
        if self.entry.name in _EMPTY:
            expected = [torch.zeros_like(e) for e in expected]
            got = [torch.zeros_like(g.torch()) for g in got]
        try:
            exact: Any = self._eager(torch.float64)
        except Exception:
            exact = reference  # the operator has no float64 form: eager's float32 is the reference
        _same("wrong value", expected, got, exact[0])
        if not grads:
            return
        ours = self._gradients(ported, list(grads))
        # One that is zero by mathematics is the difference of terms of the others' size.
        usual = max((_largest(want) for want in grads.values() if want is not None), default=0.0)
        for number, (want, have) in enumerate(zip(grads.values(), ours, strict=True)):
            want = torch.zeros_like(have) if want is None else want
            best = exact[1].get(list(grads)[number])
            _same("wrong gradient", [want], [have], [want if best is None else best], usual)

    def _is_random(self) -> bool:
        with _Draws() as seen:
            self.function(*self._given(torch.float32))
        return seen.draws

    def _gradients(self, ported: Any, wanted: list[int]) -> list[torch.Tensor]:
        given = self._given(torch.float32)
        arrays = [backend.to_jax(given[i].detach()) for i in wanted]

        def loss(arrays: list[jax.Array]) -> jax.Array:
            leaves = list(given)
            for index, array in zip(wanted, arrays, strict=True):
                leaves[index] = array
            out, _ = ported.apply({}, {}, jax.random.key(0), *leaves)
            return sum(
                (
                    _projected_jax(o, i)
                    for i, o in enumerate(pytree.flatten(out)[0])
                    if jnp.issubdtype(o.dtype, jnp.inexact)
                ),
                jnp.zeros(()),
            )

        return [backend.to_torch(g) for g in jax.jit(jax.grad(loss))(arrays)]


def _refusal(error: TpuportError) -> str:
    """Return the code and the message of a refusal, without its place."""
    message = getattr(error, "message", str(error)).splitlines()[0]
    return f"{getattr(error, 'code', None) or ''} {message[:120]}".strip()


def _wants(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _flows(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.requires_grad


def _weights(shape: Any, index: int) -> np.ndarray:
    count = int(np.prod(shape))
    return np.cos(np.arange(count, dtype=np.float64) * 0.7 + index).reshape(tuple(shape))


def _projected(out: torch.Tensor, index: int) -> torch.Tensor:
    weights = torch.from_numpy(_weights(out.shape, index))
    if out.is_complex():
        return (out.real * weights).sum() + (out.imag * weights).sum()
    return (out * weights.to(out.dtype)).sum()


def _projected_jax(out: jax.Array, index: int) -> jax.Array:
    weights = jnp.asarray(_weights(out.shape, index), jnp.float32)
    if jnp.issubdtype(out.dtype, jnp.complexfloating):
        return jnp.sum(out.real * weights) + jnp.sum(out.imag * weights)
    return jnp.sum(out.astype(jnp.float32) * weights)


class _Different(Exception):
    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def _largest(tensor: torch.Tensor) -> float:
    values = tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0)
    return float(values.max()) if values.numel() else 0.0


def _same(
    kind: str, expected: list[Any], got: list[Any], exact: list[Any], least: float = 0.0
) -> None:
    """Compare results; rounding is relative to the largest element, and at least to `least`.

    Raises:
        _Different: the port is farther from float64 than eager is.
    """
    if len(expected) != len(got):
        raise _Different(kind, f"{len(got)} results for {len(expected)}")
    for want, have, best in zip(expected, got, exact, strict=True):
        if not isinstance(want, torch.Tensor):
            if want != have:
                raise _Different(kind, f"{have!r} for {want!r}")
            continue
        if not isinstance(have, torch.Tensor):
            raise _Different(kind, f"a {type(have).__name__} for a tensor")
        have = have.torch() if isinstance(have, backend.TorchaxTensor) else have
        if have.shape != want.shape or (kind == "wrong value" and have.dtype != want.dtype):
            raise _Different(
                kind, f"{have.dtype}{list(have.shape)} for {want.dtype}{list(want.shape)}"
            )
        _near(kind, want.detach(), have.detach(), best.detach(), least)


def _near(
    kind: str, want: torch.Tensor, have: torch.Tensor, best: torch.Tensor, least: float
) -> None:
    want, have, best = (
        t.to_dense() if t.layout is not torch.strided else t for t in (want, have, best)
    )
    if not want.numel():
        return
    if not (want.is_floating_point() or want.is_complex()):
        if not torch.equal(want, have):
            raise _Different(
                kind, f"{have.flatten()[:4].tolist()} for {want.flatten()[:4].tolist()}"
            )
        return
    wide = torch.complex128 if want.is_complex() else torch.float64
    want, have, best = want.to(wide), have.to(wide), best.to(wide)
    finite = torch.isfinite(want)
    if not torch.equal(torch.nan_to_num(have[~finite], 7.0), torch.nan_to_num(want[~finite], 7.0)):
        raise _Different(kind, f"{have[~finite][:3].tolist()} for {want[~finite][:3].tolist()}")
    if not finite.any():
        return
    if not torch.isfinite(have[finite]).all():
        raise _Different(kind, "not finite where eager is")
    scale = float(want[finite].abs().max())
    usual = float((want - best)[finite].abs().nan_to_num(0.0, 0.0).max())
    error = float((have - want)[finite].abs().max())
    if error > NOISE * max(scale, least, 1e-2) + FACTOR * usual:
        raise _Different(
            kind, f"off by {error:.1e} of {scale:.1e} (eager from float64: {usual:.1e})"
        )


def page(outcomes: list[Outcome], most: int | None) -> str:
    """Write the page."""
    counts = Counter(outcome.kind for outcome in outcomes)
    total = sum(len(outcome.findings) for outcome in outcomes)
    fine = sum(counts[kind] for kind in ("passes", "refused"))
    asked = "" if most is None else f" --most {most}"
    lines = [
        "# PyTorch's own operator tests",
        "",
        f"Written by `python -m benchmarks.opinfo{asked}`. Each entry of PyTorch's database of",
        f"operators (torch {torch.__version__.partition('+')[0]}, `torch.testing._internal`) runs"
        " through `convert` with",
        ("all of its samples" if most is None else f"up to {most} of its samples, spread over all")
        + f" ({total:,}), values and gradients. A port may be {FACTOR:.0f}",
        "times as far from float64 as eager float32 is. It took"
        f" {sum(outcome.seconds for outcome in outcomes) / 60:.0f} minutes.",
        "",
        f"Of {len(outcomes)} entries {fine} pass or are refused with a reason.",
        "",
        "| outcome | entries |",
        "|---|---|",
        *(f"| {kind} | {counts[kind]} |" for kind in KINDS[::-1] if counts[kind]),
        "",
        "An entry counts by its worst sample: of one that is refused, others may pass. Of an entry"
        " that was not run",
        "there is nothing to compare: eager PyTorch on the CPU refuses all of its samples, or has"
        " no dtype for them.",
        "",
        "| entry | outcome | samples | reasons |",
        "|---|---|---|---|",
    ]
    for outcome in sorted(outcomes, key=lambda one: (one.kind, one.name)):
        if outcome.kind == "passes":
            continue
        bad = [f for f in outcome.findings if f.kind == outcome.kind or KINDS.index(f.kind) < 5]
        reasons = "; ".join(dict.fromkeys(f"{f.kind}: {f.reason}" for f in bad[:3]))
        reasons = reasons.replace("|", "\\|").replace("\n", " ")
        share = f"{len(bad)} of {len(outcome.findings)}"
        lines.append(f"| `{outcome.name}` | {outcome.kind} | {share} | {reasons} |")
    return "\n".join(lines) + "\n"


def finished(path: Path | None, most: int | None) -> dict[str, Outcome]:
    """Return the outcomes that an earlier run with as many samples wrote to this file."""
    found: dict[str, Outcome] = {}
    if path is None or not path.exists():
        return found
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the run ended while it wrote this line: the entry runs again
        if record["most"] == most:
            findings = [Finding(**finding) for finding in record["findings"]]
            seconds = record.get("seconds", 0.0)
            found[record["name"]] = Outcome(record["name"], findings, seconds)
    return found


def record(outcome: Outcome, most: int | None) -> str:
    """Return an outcome as a line of the file that `finished` reads."""
    return json.dumps({"most": most, **asdict(outcome)}) + "\n"


def main() -> None:
    """Run the database, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=None, help="samples of each operator")
    parser.add_argument("--only", default="", help="operators whose names contain this")
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument(
        "--resume", type=Path, help="a file of finished entries: those in it do not run again"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    entries = [entry for entry in database() if options.only in full_name(entry)]
    done = finished(options.resume, options.most)
    outcomes = []
    for number, entry in enumerate(entries, 1):
        name = full_name(entry)
        if name in done:
            outcomes.append(done[name])
            continue
        began = time.perf_counter()
        outcome = run(entry, options.most)
        outcome.seconds = time.perf_counter() - began
        outcomes.append(outcome)
        if options.resume is not None:
            with options.resume.open("a") as lines:
                lines.write(record(outcome, options.most))
        progress = f"[{number}/{len(entries)}] {name} {outcome.seconds:.1f} s"
        print(progress, file=sys.stderr, flush=True)
        if outcome.kind != "passes":
            bad = next(f for f in outcome.findings if f.kind == outcome.kind)
            print(f"{outcome.name}: {bad.kind} in sample {bad.sample}: {bad.reason}", flush=True)
        if number % 50 == 0:
            jax.clear_caches()
    options.out.write_text(page(outcomes, options.most))


if __name__ == "__main__":
    main()
