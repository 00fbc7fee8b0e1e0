"""Parts of a `CompileReport`: plain data, in bytes of one chip unless told otherwise."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """The memory of a program in a chip's HBM.

    Attributes:
        available: HBM that libtpu leaves to programs.
        parameters: trainable parameters.
        optimizer: the optimizer's state.
        buffers: other state of the model, frozen parameters included.
        inputs: the arguments of the call, the key, and counters of training.
        padding: padding of tiles in all of these.
        outputs: results that do not alias a donated argument.
        temporaries: activations and whatever else lives only while the program runs.
        code: the program itself, with its constants.
        aliased: results in the memory of a donated argument; counted there.
        host: arrays offloaded to the host's memory; not part of the peak.
        averages: averages of the parameters (`ema_decay` of `tpuport.training.make_train_step`).
        refused: bytes that libtpu says the program would need, if it refused it; 0 otherwise.
            `temporaries` is then the remainder of that, results and code included.
    """

    available: int
    parameters: int
    optimizer: int
    buffers: int
    inputs: int
    padding: int = 0
    outputs: int = 0
    temporaries: int = 0
    code: int = 0
    aliased: int = 0
    host: int = 0
    refused: int = 0
    averages: int = 0

    @property
    def peak(self) -> int:
        """Return the bytes that are held at once."""
        return sum(self.parts().values())

    @property
    def state(self) -> int:
        """Return the bytes of state that a program carries from one run to the next."""
        return self.parameters + self.optimizer + self.averages + self.buffers

    @property
    def fits(self) -> bool:
        """Return whether a chip can hold the program."""
        return not self.refused and self.peak <= self.available

    def parts(self) -> dict[str, int]:
        """Return the parts of the peak, by name."""
        return {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "averages": self.averages,
            "buffers": self.buffers,
            "inputs": self.inputs,
            "padding of these": self.padding,
            "outputs": self.outputs,
            "temporaries": self.temporaries,
            "code": self.code,
        }


@dataclass(frozen=True)
class HeldMemory:
    """Arrays of one kind in HBM at the peak, or among the largest that the program computes.

    Attributes:
        module: module that makes them; blocks that differ only in their number are one.
        operation: operation that makes them, such as `dot_general`, with `backward` for a gradient.
        shape: dtype and sizes of one.
        count: number of arrays.
        bytes: size of all of them.
    """

    module: str
    operation: str
    shape: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Moved:
    """Collectives of one kind with one cause.

    Attributes:
        kind: `all-gather` and the like.
        module: module that they belong to; blocks that differ only in their number are one.
        rule: rule of the table that causes them, if it is known.
        count: number that run in a step.
        group_size: number of chips that take part in one.
        bytes: bytes that all of them move in a step, on one chip.
    """

    kind: str
    module: str
    rule: str
    count: int
    group_size: int
    bytes: int


@dataclass(frozen=True)
class Product:
    """Matrix products of one kind.

    Attributes:
        dtypes: dtypes of both operands: `bfloat16 x bfloat16`.
        module: module that they belong to; "" for all modules.
        count: number that run in a step.
        flops: FLOPs of all of them, on all chips.
    """

    dtypes: str
    module: str
    count: int
    flops: int


@dataclass(frozen=True)
class AttentionUse:
    """Attention of one kind in the program.

    Attributes:
        module: module that it belongs to; blocks that differ only in their number are one.
        kernel: name of its Pallas kernel, or "full scores".
        shape: shape of the array of scores, if there is one.
        count: number of such kernels or arrays.
        bytes: size of all arrays of scores, on all chips.
    """

    module: str
    kernel: str
    shape: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Work:
    """The work of one step.

    Attributes:
        model_flops: FLOPs of the traced program's products, convolutions and kernels, on all chips.
        chip_flops: FLOPs of products on one chip after partitioning, repeated work included.
        hbm_bytes: bytes that one chip reads from HBM and writes to it, kernels left out.
        products: products by dtypes, the most FLOPs first.
        fp32_products: products with float32 operands by module, the most FLOPs first.
        collectives: collectives, the most bytes first.
        attention: attention kernels, and arrays of scores.
        copied_bytes: bytes written by copies that change layouts, on one chip.
        padding_bytes: padding of tiles in the arrays of the program, on one chip.
        unknown: work that could not be counted, in sentences.
    """

    model_flops: int
    chip_flops: int = 0
    hbm_bytes: int = 0
    products: tuple[Product, ...] = ()
    fp32_products: tuple[Product, ...] = ()
    collectives: tuple[Moved, ...] = ()
    attention: tuple[AttentionUse, ...] = ()
    copied_bytes: int = 0
    padding_bytes: int = 0
    unknown: tuple[str, ...] = ()

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes that a chip moves in a step, by kind of collective."""
        found: dict[str, int] = {}
        for one in self.collectives:
            found[one.kind] = found.get(one.kind, 0) + one.bytes
        return found


@dataclass(frozen=True)
class Captured:
    """A constant of the host that the program holds.

    Attributes:
        name: its origin, as far as that is known.
        shape: dtype and sizes.
        bytes: its size.
    """

    name: str
    shape: str
    bytes: int


@dataclass(frozen=True)
class Seconds:
    """The time of each stage on this machine."""

    trace: float
    lower: float
    compile: float

    @property
    def total(self) -> float:
        """Return the seconds of all stages."""
        return self.trace + self.lower + self.compile
