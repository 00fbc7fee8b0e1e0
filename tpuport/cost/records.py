"""Results of the counting functions: plain data, in FLOP, bytes and seconds."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Dot:
    """A matrix product or convolution of a jaxpr.

    Args:
        module: the module that it belongs to, "" if none is known.
        kind: `dot_general` or `conv_general_dilated`.
        lhs_dtype: dtype of the left operand.
        rhs_dtype: dtype of the right operand.
        out_dtype: dtype of the result.
        batch: size of the batch dims, multiplied.
        rows: size of the left operand's free dims (of a convolution: batch and positions).
        columns: size of the right operand's free dims (of a convolution: output channels).
        contraction: size of the contracted dims (of a convolution: the inputs of one output).
        times: number of runs in a step, on all chips together.
    """

    module: str
    kind: str
    lhs_dtype: str
    rhs_dtype: str
    out_dtype: str
    batch: int
    rows: int
    columns: int
    contraction: int
    times: int = 1

    @property
    def flops(self) -> int:
        """Return the multiplications and additions of all runs."""
        return 2 * self.batch * self.rows * self.columns * self.contraction * self.times

    @property
    def dtypes(self) -> tuple[str, str]:
        """Return the dtypes of both operands."""
        return self.lhs_dtype, self.rhs_dtype


@dataclass(frozen=True)
class Kernel:
    """A Pallas call of a jaxpr.

    Args:
        module: the module that it belongs to, "" if none is known.
        name: the kernel's name.
        grid: its grid.
        flops: FLOPs of one call: the call's own cost estimate, or those of the products in its
            body at each step of the grid.
        exact: whether the figure is a cost estimate of the kernel's author, or of the steps that a
            constant mask does not skip. Otherwise it is an upper bound: every step is counted.
        bytes: fewest bytes that one call reads and writes, each operand once.
        times: number of runs in a step, on all chips together.
    """

    module: str
    name: str
    grid: tuple[int, ...]
    flops: int
    exact: bool
    bytes: int
    times: int = 1

    @property
    def steps(self) -> int:
        """Return the steps of the grid of one call."""
        return math.prod(self.grid)


@dataclass(frozen=True)
class Constant:
    """An array that is a literal of the program."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class ScoreArray:
    """An array as large as the attention scores of all queries and keys, (..., Sq, Sk)."""

    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class ModuleCost:
    """The work of one module, without that of its children."""

    flops: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class JaxprCost:
    """The work of a traced program, on all chips together.

    Args:
        flops: FLOPs of matrix products, convolutions and kernels.
        bytes: fewest bytes that these read and write, each operand once. Everything else is
            assumed to be fused into them.
        modules: FLOPs and bytes by module.
        dots: every matrix product and convolution.
        kernels: every Pallas call.
        constants: literals, the largest first.
        scores: arrays of the size of attention scores.
        unknown: work that could not be counted, in sentences.
    """

    flops: int
    bytes: int
    modules: dict[str, ModuleCost]
    dots: tuple[Dot, ...]
    kernels: tuple[Kernel, ...] = ()
    constants: tuple[Constant, ...] = ()
    scores: tuple[ScoreArray, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Buffer:
    """An array of a compiled program, on one chip.

    Args:
        name: the instruction's name.
        opcode: its operation.
        module: the module that it belongs to, "" if none is known.
        shape: shape as HLO writes it, with its layout.
        bytes: size of its elements.
        padded_bytes: size with the padding of its tiles.
    """

    name: str
    opcode: str
    module: str
    shape: str
    bytes: int
    padded_bytes: int


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program.

    Args:
        kind: `all-gather` and the like.
        module: the module that it belongs to, "" if none is known.
        bytes: bytes that one run moves, on one chip: the operand of a reduce-scatter, the result of
            the others.
        group_size: number of chips that take part in it.
        times: number of runs in a step.
        operation: name of the jaxpr's operation that it was made for.
    """

    kind: str
    module: str
    bytes: int
    group_size: int
    times: int = 1
    operation: str = ""


@dataclass(frozen=True)
class Custom:
    """A kernel in a compiled program."""

    name: str
    target: str
    module: str
    times: int = 1


@dataclass(frozen=True)
class CompiledCost:
    """The work of a compiled program on one chip.

    Args:
        dot_flops: FLOPs of matrix products and convolutions after partitioning, including work
            that several chips repeat.
        collectives: collectives, each once with the number of its runs.
        copies: results of copies and transposes that change a layout, in HBM or on the chip, and of
            copies within one memory; the most written first.
        copied_bytes: bytes that those write in a step, padding included.
        padding_bytes: padding of tiles in all arrays in HBM (not all are live at the same time).
        buffers: arrays in HBM, the largest first.
        kernels: the calls of Pallas kernels.
        dot_flops_by_module: `dot_flops` by module, the most first.
        estimated_cycles: XLA's own estimate for its schedule on a TPU, loops by their trip counts,
            without kernels and collectives. 0 where the text has none, as on a CPU.
        hbm_bytes: bytes read from HBM and written to it by everything but kernels, loops by their
            trip counts. Arrays that stay in a TPU's on-chip memory are left out.
        unknown: work that could not be counted, in sentences.
    """

    dot_flops: int
    collectives: tuple[Collective, ...] = ()
    copies: tuple[Buffer, ...] = ()
    copied_bytes: int = 0
    padding_bytes: int = 0
    buffers: tuple[Buffer, ...] = ()
    kernels: tuple[Custom, ...] = ()
    dot_flops_by_module: dict[str, int] = field(default_factory=dict)
    estimated_cycles: int = 0
    hbm_bytes: int = 0
    unknown: tuple[str, ...] = ()

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes that a chip moves in a step, by kind of collective."""
        found: dict[str, int] = {}
        for one in self.collectives:
            found[one.kind] = found.get(one.kind, 0) + one.bytes * one.times
        return found


@dataclass(frozen=True)
class Part:
    """One part of an estimate: its seconds, and how they were computed."""

    name: str
    seconds: float
    how: str


@dataclass(frozen=True)
class Estimate:
    """The estimated time of one step, and its assumptions.

    Args:
        parts: the parts dense, hbm, collectives and kernels.
        assumptions: assumptions of the estimate, in sentences.
        calibration: where the rates were measured; "" if they are those that the maker states.
    """

    parts: tuple[Part, ...]
    assumptions: tuple[str, ...]
    calibration: str = ""

    @property
    def seconds(self) -> float:
        """Return the seconds of one step: its parts in sequence."""
        return sum(part.seconds for part in self.parts)
