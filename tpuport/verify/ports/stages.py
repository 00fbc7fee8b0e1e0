"""The three stages: interface, numbers, behaviour."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tpuport.verify.compare import Comparison, Stage
from tpuport.verify.ports.original import Original, OriginalRun
from tpuport.verify.ports.port import Port
from tpuport.verify.ports.program import ProgramRun, run, run_compiled
from tpuport.verify.ports.search import EXACT, FirstDifference, ValuesInBetween
from tpuport.verify.ports.table import OriginalState, Table
from tpuport.verify.ports.training import Trained

# How much further than eager PyTorch a port may be from the truth.
_FACTOR = 4.0
_GRADIENTS = 1e-8
_NO_GRADIENT = 1e-6
_TRAINED = 1e-6
_FLOAT32 = 2e-7
_HINT = 1e-3


def interface(
    plain: OriginalRun,
    shapes: Sequence[tuple[str, Any]],
    state: OriginalState,
    table: Table,
    port: Port,
) -> Stage:
    """Compare outputs by shape and dtype, which weights there are, and their values."""
    outputs = Comparison("outputs: number, shapes")
    outputs.count = len(plain.out)
    if len(plain.out) != len(shapes):
        outputs.problems.append(f"{len(plain.out)} in the original, {len(shapes)} in the port")
    for mine, (path, other) in zip(plain.out, shapes, strict=False):
        if mine.shape != other.shape:
            turned = sorted(mine.shape) == sorted(other.shape) and mine.ndim > 1
            hint = "; output=lambda y: y.transpose(...) turns the port's" if turned else ""
            outputs.problems.append(
                f"{path}: {list(mine.shape)} in the original, {list(other.shape)} in the port{hint}"
            )
        elif mine.dtype.kind != other.dtype.kind and "V" not in other.dtype.kind:
            outputs.problems.append(
                f"{path}: {mine.dtype} in the original, {other.dtype} in the port"
            )
    return Stage("interface", [outputs, _coverage(state, table), _starts(state, table, port)])


def _coverage(state: OriginalState, table: Table) -> Comparison:
    check = Comparison("weights: each once")
    check.count = len(table.entries)
    held = np.zeros(state.size, np.int32)
    for entry in table.entries.values():
        np.add.at(held, entry.ids.reshape(-1), 1)
    check.problems += [
        f"{leaf}: nothing in the original has its values or a like name; give it in names"
        for leaf in table.unknown
    ]
    for name in state.own:
        times = held[state.ids[name].numpy()]
        if name in state.trained and times.size and not times.all():
            part = "" if not times.any() else "a part of "
            check.problems.append(f"{name}: {part}it is in no leaf of the port")
        if (times > 1).any():
            leaves = [
                leaf for leaf, e in table.entries.items() if np.isin(e.ids, state.ids[name]).any()
            ]
            tied = sorted({name, *(n for n, first in state.ties.items() if first == name)})
            why = f"tied in the original ({', '.join(tied)}), " if len(tied) > 1 else ""
            check.problems.append(
                f"{name}: {why}but {len(leaves)} leaves of the port, which train apart:"
                f" {', '.join(leaves)}"
            )
    return check


def _starts(state: OriginalState, table: Table, port: Port) -> Comparison:
    check = Comparison("weights: values")
    arrays = port.weights.arrays()
    for leaf, entry in table.entries.items():
        want = state.flat[entry.ids]
        check.add(leaf, _relative(want.astype(arrays[leaf].dtype), arrays[leaf]))
    return check


def own_values(port: Port, state: OriginalState, table: Table) -> list[bool]:
    """Return for each leaf whether it trains: it is of a parameter that requires grad."""
    found = []
    for leaf in port.weights.names:
        entry = table.entries.get(leaf)
        names = [] if entry is None else state.names_of(entry.ids)
        found.append(bool(names) and all(name in state.trained for name in names))
    return found


class Numbers:
    """The second stage.

    Attributes:
        masks: The dropout masks that the port drew in float64.
        notes: What a reader has to know.
        first: Where the two part, if they do.
        found: How many values in between of the original the port has, and of how many.
    """

    def __init__(
        self, original: Original, port: Port, state: OriginalState, table: Table, rtol: float
    ) -> None:
        self.original, self.port, self.state, self.table = original, port, state, table
        self.rtol = rtol
        self.masks: list[np.ndarray] = []
        self.notes: list[str] = []
        self.first: list[FirstDifference] = []
        self.found = (0, 0)

    def stage(self) -> Stage:
        """Compare outputs, losses, values in between and gradients."""
        port, rtol = self.port, self.rtol
        arrays = [*port.weights.arrays().values(), *port.inputs()]
        ours = run(port.forward(wide=True), arrays, wide=True, record=True)
        self.masks = [mask for mask in ours.masks if _is_mask(mask)]
        truth = self.original.run(self.masks, wide=True, record=True)
        eager = self.original.run(self.masks, wide=False, record=True)
        self._note(truth, ours)
        dropout = Comparison("dropout masks")
        dropout.count = truth.masks
        if truth.masks != len(self.masks):
            dropout.problems.append(
                f"the original drops {truth.masks} times, the port {len(self.masks)} times: give it"
                " a key and its mode of training, or call eval() on the original"
            )
        exact = self._results("float64", truth, eager, ours.out, EXACT)
        checks = [*([dropout] if truth.masks or self.masks else []), *exact]
        values = ValuesInBetween(eager, truth, ours, rounding=EXACT)
        self._search(values, exact, truth, ours)
        self._search_below_rounding(exact, truth, ours)
        if not all(check.passed for check in checks):
            return Stage("numbers", checks)
        checks += [self._gradients(truth, eager, arrays), *self._own_dtypes(arrays, truth, rtol)]
        return Stage("numbers", checks)

    def _own_dtypes(
        self, arrays: Sequence[Any], truth: OriginalRun, rtol: float
    ) -> list[Comparison]:
        """Compare results in the dtypes that the port's code asks for."""
        port = self.port
        program = port.forward(wide=False)
        masks: list[np.ndarray] = []
        if self.masks:  # jax draws other numbers in float64
            masks = [m for m in run(program, arrays, wide=False).masks if _is_mask(m)]
            truth = self.original.run(masks, wide=True, record=False)
        eager = self.original.run(masks, wide=False, record=False)
        checks = self._results("own dtypes", truth, eager, run_compiled(program, arrays), rtol)
        if not all(check.passed for check in checks):
            ours = run(program, arrays, wide=False, record=True)
            truth, eager = (
                self.original.run(masks, wide=wide, record=True) for wide in (True, False)
            )
            values = ValuesInBetween(eager, truth, ours, rounding=rtol / 10)
            self._search(values, checks, truth, ours)
        return checks

    def _results(
        self, how: str, truth: OriginalRun, eager: OriginalRun, ours: list[np.ndarray], limit: float
    ) -> list[Comparison]:
        outputs = Comparison(f"outputs, {how}", limit=limit)
        loss = Comparison(f"loss, {how}", limit=limit)
        names = [*(f"output {i}" for i in range(len(truth.out))), "loss"]
        triples = zip([*truth.out, truth.loss], [*eager.out, eager.loss], ours, strict=True)
        for name, (want, near, have) in zip(names, triples, strict=True):
            check = loss if name == "loss" else outputs
            check.allowed[name] = _FACTOR * _relative(want, near)
            check.add(name, _relative(want, have))
        return [outputs, loss]

    def _search(
        self,
        values: ValuesInBetween,
        checks: Sequence[Comparison],
        truth: OriginalRun,
        ours: ProgramRun,
    ) -> None:
        """Find where the two part, on the way to the first result that differs."""
        looked = [i for i, step in enumerate(truth.steps) if not step.is_constant]
        self.found = sum(values.in_original[i] for i in looked), len(looked)
        names = [*(f"output {i}" for i in range(len(truth.out))), "loss"]
        bad = {name for check in checks for name in check.errors if _fails(check, name)}
        for index, name in enumerate(names):
            if name in bad:
                self.first.append(values.first(name, truth.ends[index], ours.ends[index]))
                return

    def _search_below_rounding(
        self, checks: Sequence[Comparison], truth: OriginalRun, ours: ProgramRun
    ) -> None:
        """Note where formulas part that differ by less than float32 rounds."""
        if all(check.passed for check in checks) and any(check.is_rounding for check in checks):
            values = ValuesInBetween(truth, truth, ours, rounding=EXACT / 10, strict=True)
            index = next(i for i, check in enumerate(checks) if check.is_rounding)
            end = 0 if index == 0 else len(truth.out)
            first = values.first(checks[index].worst, truth.ends[end], ours.ends[end])
            place = first.port[0] if first.port else "(not found)"
            self.notes.append(
                f"{checks[index].what}: equal only as far as float32 rounds, where equal formulas"
                f" are 1e-12 apart. It begins at {place}"
            )

    def _gradients(
        self, truth: OriginalRun, eager: OriginalRun, arrays: Sequence[Any]
    ) -> Comparison:
        port, state = self.port, self.state
        made = run(port.gradients(wide=True), arrays, wide=True).out
        trainable = own_values(port, state, self.table)
        want, near = (state.joined(one.gradients) for one in (truth, eager))
        check = Comparison("gradients, float64", limit=_GRADIENTS)
        at_least = _NO_GRADIENT * float(np.abs(want).max(initial=0.0))
        for leaf, have, trains in zip(port.weights.names, made, trainable, strict=True):
            entry = self.table.entries.get(leaf)
            names = [] if entry is None else state.names_of(entry.ids)
            if not trains and any(name in state.trained for name in names):
                self.notes.append(f"Not looked at: gradients of {leaf}, of which a part is frozen.")
            if trains:
                ids = self.table.entries[leaf].ids
                check.allowed[leaf] = _FACTOR * _relative(want[ids], near[ids], at_least)
                check.add(leaf, _relative(want[ids], have, at_least))
        return check

    def _note(self, truth: OriginalRun, ours: ProgramRun) -> None:
        if truth.changed:
            self.notes.append(
                f"Not looked at: what forward writes to buffers ({', '.join(truth.changed[:3])})."
            )
        if truth.drawn:
            self.notes.append(
                f"Not looked at: random numbers that the original draws ({truth.drawn[0]}); pass"
                " them in as arguments."
            )
        if ours.narrow:
            self.notes.append(f"Not in float64: {', '.join(ours.narrow[:5])} of the port.")
        if self.original.model.training and not truth.masks:
            self.notes.append("The original is in training mode and drops nothing out.")
        if not self.original.model.training:
            self.notes.append("Not looked at: training mode (dropout, batch statistics).")


def _fails(check: Comparison, name: str) -> bool:
    return not check.errors[name] <= max(check.limit, check.allowed.get(name, 0.0))


def _is_mask(values: np.ndarray) -> bool:
    return values.dtype == bool or (values.size > 2 and len(np.unique(values)) <= 2)


def behaviour(
    port: Port,
    state: OriginalState,
    table: Table,
    mine: Trained,
    rounded: Trained,
    other: Trained,
    trainable: Sequence[bool],
) -> tuple[Stage, list[str]]:
    """Compare losses, parameters and averages of some steps; return hints too."""
    losses = Comparison("losses of all steps", limit=_TRAINED)
    for step, (a, near, b) in enumerate(
        zip(mine.losses, rounded.losses, other.losses, strict=True), 1
    ):
        losses.allowed[f"step {step}"] = _FACTOR * _relative(np.array(a), np.array(near))
        losses.add(f"step {step}", _relative(np.array(a), np.array(b)))
    starts = [
        state.flat[table.entries[n].ids] if n in table.entries else None for n in port.weights.names
    ]
    checks, notes = [losses], []
    for what, sides in (
        ("parameters", (mine.states, rounded.states, other.states)),
        ("average", (mine.averages, rounded.averages, other.averages)),
    ):
        for step in sorted({0, len(sides[0]) - 1}) if sides[0] else ():
            when = f"{what} after step {step + 1}"
            check = Comparison(when, limit=_TRAINED)
            rows = list(_moves(port, table, starts, trainable, *(s[step] for s in sides)))
            sizes = [float(np.sqrt(np.mean((w - s) ** 2))) for _, s, w, _, _ in rows if w.size]
            at_least = _NO_GRADIENT * max(sizes, default=0.0)
            for leaf, start, want, near, have in rows:
                floor = max(
                    at_least * want.size**0.5, _FLOAT32 * 1e-6 * float(np.linalg.norm(want))
                )
                scale = max(float(np.linalg.norm(want - start)), floor)
                check.allowed[leaf] = _FACTOR * _ratio(near - want, scale)
                check.add(leaf, _ratio(have - want, scale))
            if not check.passed and step == 0:
                notes += _hint(what, rows)
            checks.append(check)
    return Stage("behaviour", checks), notes


def _moves(
    port: Port,
    table: Table,
    starts: Sequence[Any],
    trainable: Sequence[bool],
    mine: np.ndarray,
    rounded: np.ndarray,
    other: Sequence[Any],
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    for leaf, start, have, trains in zip(port.weights.names, starts, other, trainable, strict=True):
        if trains:
            ids = table.entries[leaf].ids
            yield leaf, start, mine[ids], rounded[ids], np.asarray(have)


def _hint(what: str, rows: Sequence[tuple[Any, ...]]) -> list[str]:
    """Say what the difference after one step looks like."""
    if what == "average":
        still = all(np.allclose(have, start, rtol=1e-9, atol=0) for _, start, _, _, have in rows)
        if still:
            return [
                "After step 1 the port's average is what it started with: it is updated before the"
                " optimizer's step."
            ]
        return []
    shares = []
    for leaf, start, want, _, have in rows:
        apart, size = have - want, float((start**2).sum())
        norm = float(np.linalg.norm(apart))
        if size and norm:
            share = float((apart * start).sum()) / size
            if np.linalg.norm(apart - share * start) < _HINT * norm:
                shares.append((leaf, share))
    if not shares:
        return []
    leaf, share = shares[0]
    return [
        f"After step 1 {leaf} and {len(shares) - 1} others differ by {share:+.3g} times their"
        " value: weight decay."
    ]


def _ratio(apart: np.ndarray, scale: float) -> float:
    norm = float(np.linalg.norm(apart))
    if norm == 0:
        return 0.0
    return norm / scale if scale else float("inf")


def _relative(want: np.ndarray, have: np.ndarray, at_least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest element or to `at_least`."""
    wide = np.complex128 if np.iscomplexobj(want) else np.float64
    a, b = np.asarray(want).astype(wide), np.asarray(have).astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    finite = np.abs(a[np.isfinite(a)])
    size = max(float(finite.max(initial=0.0)), at_least)
    with np.errstate(invalid="ignore"):
        apart = float(np.abs(a - b)[~same].max())
    return apart / size if size and not np.isnan(apart) else float("inf")
