"""The records in a port report: one frozen dataclass for each sort of finding."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal, Self, get_args

import numpy as np

Kind = Literal["output", "gradient", "buffer", "mutated argument"]
Stage = Literal["load", "observe", "rewrite", "trace", "lower", "compile", "run", "verify"]

KINDS: tuple[Kind, ...] = get_args(Kind)
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Parity:
    """One value of the ported model against the same value of eager PyTorch.

    Attributes:
        path: The name of the value, such as `output.logits` or `grad.layers.0.weight`.
        kind: The sort of value.
        shape: Shape in eager PyTorch.
        dtype: Dtype in eager PyTorch, such as `float32`.
        max_abs: Largest `|got - expected|`. Elements that are the same NaN or infinity count as 0,
            and one that is not finite on one side only counts as infinity.
        max_rel: `max_abs / max|expected|`: relative to the largest element of the value.
        where: Index of the worst element.
        expected: Worst element in eager PyTorch.
        got: Worst element in the port.
        tolerance: Largest accepted `max_rel`. Integers, bools and strings are compared exactly.
        eager_error: Largest distance of eager PyTorch from its own result in float64, for a value
            beyond the tolerance; None if there is no such result.
        port_error: The port's largest distance from that result.
        rounding: The share used of the distance that rounding explains, measured in float64.
        turned: How many decisions, such as the sign that a ReLU sees, rounding has turned in the
            port. Eager PyTorch takes them as the port does where this is compared.
        problem: Why the two cannot be compared (other shape or dtype, a missing value), or empty.
    """

    path: str
    _: KW_ONLY
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    max_abs: float
    max_rel: float
    where: tuple[int, ...]
    expected: float
    got: float
    tolerance: float
    eager_error: float | None = None
    port_error: float | None = None
    rounding: float | None = None
    turned: int = 0
    problem: str = ""

    @classmethod
    def compare(
        cls,
        path: str,
        expected: np.ndarray,
        got: np.ndarray,
        *,
        kind: Kind,
        tolerance: float,
        dtype: str | None = None,
    ) -> Self:
        """Compare two arrays element by element, in float64.

        Args:
            path: The name of the value.
            expected: Eager PyTorch's value, of any shape and any real, integer, bool or complex
                dtype. A complex array is compared as its real view (a last dim of size 2).
            got: The port's value. A different shape or dtype is recorded as a `problem`.
            kind: The sort of value.
            tolerance: Largest accepted error relative to `max|expected|`.
            dtype: Name to report where numpy's own would mislead (a bfloat16 value that was
                widened to float32 on its way to numpy).
        """
        if expected.shape != got.shape or expected.dtype != got.dtype:
            problem = f"{_array_label(got)} where eager PyTorch gives {_array_label(expected)}"
            worst, relative, where, pair = math.inf, math.inf, (), (math.nan, math.nan)
        else:
            problem = ""
            worst, relative, where, pair = _worst_element(expected, got)
        return cls(
            path,
            kind=kind,
            shape=tuple(expected.shape),
            dtype=dtype or str(expected.dtype),
            max_abs=worst,
            max_rel=relative,
            where=where,
            expected=pair[0],
            got=pair[1],
            tolerance=tolerance,
            problem=problem,
        )

    @property
    def used(self) -> float:
        """Return the share of the tolerance used: 0 is identical, 1 the limit, inf a failure."""
        if self.problem or not _same_sort(self.expected, self.got):
            return math.inf
        share = _share(self.max_rel, self.tolerance)
        return share if self.rounding is None else min(share, _share(self.rounding, 1.0))

    @property
    def is_rounding(self) -> bool:
        """Return whether it is beyond the tolerance, and as near to float64 as eager PyTorch is."""
        return self.ok and _share(self.max_rel, self.tolerance) > 1

    @property
    def ok(self) -> bool:
        """Return whether the port reproduces this value; a NaN where eager is finite never does."""
        return self.used <= 1


@dataclass(frozen=True)
class Rewrite:
    """Source that a rule changed in the port's copy of a function.

    Attributes:
        file: Path of the user's file.
        line: First line there, counted from 1.
        code: The rule's code, such as `TPU201`.
        before: The source as written.
        after: The source as traced.
        safety: The rule's safety level: exact, close or unsafe.
    """

    file: str
    line: int
    _: KW_ONLY
    code: str
    before: str
    after: str
    safety: str


@dataclass(frozen=True)
class ShimUse:
    """A call inside someone else's package that was served by a shim.

    Attributes:
        name: The shim.
        target: Qualified name of the function that it replaced.
        reason: Why the original cannot run under a trace.
        calls: How often it was reached while tracing.
    """

    name: str
    _: KW_ONLY
    target: str
    reason: str
    calls: int


@dataclass(frozen=True)
class RegisteredOp:
    """An ATen op that tpuport lowers itself, because torchax does not or lowers it wrongly.

    Attributes:
        name: The op, such as `aten.hann_window.default`.
        reason: The behavior of torchax's own lowering.
        calls: How often it was reached while tracing.
    """

    name: str
    _: KW_ONLY
    reason: str
    calls: int


@dataclass(frozen=True)
class Retrace:
    """A trace after the first one, each a compilation.

    Attributes:
        method: The traced method, such as `forward`.
        index: Which trace of the method this was; the first retrace is 2.
        causes: The changes, such as `args[0]: float32[2, 16] -> float32[3, 16]`.
    """

    method: str
    index: int
    causes: tuple[str, ...]


@dataclass(frozen=True)
class HoistedConstant:
    """A large tensor known at trace time, passed to the compiled function as an argument.

    Attributes:
        origin: `file:line` that made it.
        shape: The tensor's shape.
        dtype: The tensor's dtype.
        bytes: The tensor's size.
    """

    origin: str
    _: KW_ONLY
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Branch:
    """A branch whose condition is only known on the device.

    Attributes:
        file: Path of the user's file.
        line: Line of the branch, counted from 1.
        source: The condition as written.
        how: How it was kept, such as `both sides traced, selected on device`.
    """

    file: str
    line: int
    _: KW_ONLY
    source: str
    how: str


@dataclass(frozen=True)
class AttentionCall:
    """Calls of scaled dot product attention from one line that are served alike.

    Attributes:
        file: Path of the file that calls it.
        line: Line of the call, counted from 1.
        module: Fqn of the first module that calls it there.
        kernel: The implementation: splash, dense (faster, if every query sees the same keys),
            blockwise, or full (the matrix of scores).
        reason: Why that one was chosen.
        mask: The structure of its mask, such as `causal, padded keys`.
        spread: What is sharded over which mesh axes, such as `heads over tensor`.
        query: Shape of the queries.
        key: Shape of the keys.
        calls: How often it was called.
    """

    file: str
    line: int
    _: KW_ONLY
    module: str
    kernel: str
    reason: str
    mask: str
    spread: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    calls: int


@dataclass
class HostPart:
    """A function that runs on the host inside the program, because it cannot be traced.

    Attributes:
        name: Its qualified name.
        file: The file that defines it.
        line: Its first line.
        reason: Why it cannot be traced, and where.
        calls: How often it ran.
        backward_calls: How often its gradient was asked for, which runs it again.
        seconds: The time that this took on the host.
        bytes: What was moved to the host and back.
    """

    name: str
    file: str
    line: int
    _: KW_ONLY
    reason: str
    calls: int = 0
    backward_calls: int = 0
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class RepeatedBlocks:
    """Blocks of a model that may be alike, and how many programs they are.

    Attributes:
        first: Fqn of the first of them.
        last: Fqn of the last.
        count: How many there are.
        programs: How many different programs their calls are.
        shared: How many calls have the program of an earlier one.
    """

    first: str
    last: str
    _: KW_ONLY
    count: int
    programs: int
    shared: int


@dataclass(frozen=True)
class Timing:
    """Seconds spent in each stage of the port, summed over methods and retraces.

    Attributes:
        load: Putting the module's weights where the program finds them.
        observe: Running eager PyTorch, to compare with it.
        rewrite: Rewriting source.
        trace: Tracing, and simplifying what was traced.
        lower: Jax's lowering.
        compile: XLA's compilation.
        run: Running each program for the first time.
        verify: Comparing.
    """

    load: float = 0.0
    observe: float = 0.0
    rewrite: float = 0.0
    trace: float = 0.0
    lower: float = 0.0
    compile: float = 0.0
    run: float = 0.0
    verify: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds over all stages."""
        return sum(getattr(self, stage) for stage in STAGES)


@dataclass(frozen=True)
class Divergence:
    """The first submodule, in the order of execution, whose output differs from eager PyTorch's.

    Attributes:
        module: Its fqn, such as `blocks.3.attn`.
        cls: Its class.
        max_rel: Error of its output, relative to the output's size.
        input_max_rel: The same for its inputs, which still agreed.
    """

    module: str
    _: KW_ONLY
    cls: str
    max_rel: float
    input_max_rel: float


Record = (
    Parity
    | Rewrite
    | ShimUse
    | RegisteredOp
    | Retrace
    | HoistedConstant
    | Branch
    | AttentionCall
    | RepeatedBlocks
    | HostPart
    | Divergence
)


def _worst_element(
    expected: np.ndarray, got: np.ndarray
) -> tuple[float, float, tuple[int, ...], tuple[float, float]]:
    """Return the largest absolute error, the relative one, its index, and both elements."""
    error, want, have = _errors(expected, got)
    if not error.size:
        return 0.0, 0.0, (), (0.0, 0.0)
    where = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    worst = float(error[where])
    scale = float(np.abs(np.where(np.isfinite(want), want, 0.0)).max())
    relative = worst / scale if scale else (math.inf if worst else 0.0)
    return worst, relative, where, (float(want[where]), float(have[where]))


def _errors(expected: np.ndarray, got: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the element-wise error and both sides in float64; the dtypes and shapes are equal."""
    if np.iscomplexobj(expected):
        expected, got = (np.stack([np.real(x), np.imag(x)], axis=-1) for x in (expected, got))
    # Uninitialized memory has signalling NaNs, of which casts and comparisons warn.
    with np.errstate(invalid="ignore"):
        want, have = expected.astype(np.float64), got.astype(np.float64)
        same = (expected == got) | (np.isnan(want) & np.isnan(have))
        error = np.where(same, 0.0, np.abs(have - want))
    error[np.isnan(error)] = math.inf
    # Integers beyond 2**53 may differ and yet be one float64.
    error[~same & (error == 0)] = 1.0
    return error, want, have


def _array_label(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _same_sort(expected: float, got: float) -> bool:
    """Return whether both are finite, both NaN, or both the same infinity."""
    if math.isfinite(expected) or math.isfinite(got):
        return math.isfinite(expected) and math.isfinite(got)
    return expected == got or (math.isnan(expected) and math.isnan(got))


def _share(error: float, limit: float) -> float:
    """Return `error / limit`, where no error fits any limit and NaN fits none."""
    if error == 0:
        return 0.0
    return error / limit if limit > 0 and not math.isnan(error) else math.inf
