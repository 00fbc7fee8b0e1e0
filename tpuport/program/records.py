"""What a `CompileReport` is made of: plain data, in bytes of one chip unless told otherwise."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """What a program takes of a chip's HBM.

    Attributes:
        available: what libtpu gives to programs.
        parameters: trainable parameters.
        optimizer: the optimizer's state.
        buffers: other state of the model, frozen parameters included.
        inputs: the arguments of the call, the key, and counters of training.
        padding: what tiles add to all of these.
        outputs: results that do not take over the memory of an argument.
        temporaries: activations and whatever else lives only while the program runs.
        code: the program itself, with its constants.
        aliased: results in the memory of an argument; counted there.
        host: what was offloaded to the host's memory; not part of the peak.
        averages: of the parameters (`ema_decay` of `tpuport.training.make_train_step`).
        refused: what libtpu says that the program would need, where it refused it; 0 otherwise.
            Then `temporaries` is what is left of that, results and code included.
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
        """All that is held at once."""
        return sum(self.parts().values())

    @property
    def state(self) -> int:
        """What a program takes over from one run to the next."""
        return self.parameters + self.optimizer + self.averages + self.buffers

    @property
    def fits(self) -> bool:
        """Whether a chip can hold it."""
        return not self.refused and self.peak <= self.available

    def parts(self) -> dict[str, int]:
        """What the peak is made of, by name."""
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
class Held:
    """Arrays of one kind in HBM when most is there, or the largest that the program computes.

    Attributes:
        module: the module that makes them; blocks that differ in their number only are one.
        operation: what they are made by, such as `dot_general`, with `backward` for a gradient.
        shape: dtype and sizes of one.
        count: how many there are.
        bytes: of all of them.
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
        module: the module that they are for; blocks that differ in their number only are one.
        rule: what of the table of rules causes them, where that is known.
        count: how many run in a step.
        group_size: how many chips take part in one.
        bytes: what all of them hand on in a step, on one chip.
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
        dtypes: of both operands: `bfloat16 x bfloat16`.
        module: where they are; "" for all modules.
        count: how many run in a step.
        flops: of all of them, on all chips.
    """

    dtypes: str
    module: str
    count: int
    flops: int


@dataclass(frozen=True)
class Attention:
    """Attention in the program.

    Attributes:
        module: where it is; blocks that differ in their number only are one.
        kernel: the name of its Pallas kernel, or "full scores".
        shape: of the array of scores, where there is one.
        count: how many there are.
        bytes: of all arrays of scores, on all chips.
    """

    module: str
    kernel: str
    shape: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Work:
    """What a step does.

    Attributes:
        model_flops: of the traced program, on all chips: products, convolutions and kernels.
        chip_flops: of products on one chip, as they were partitioned: repeated work is in it.
        hbm_bytes: what one chip reads from HBM and writes to it, kernels left out.
        products: by dtypes, the most FLOPs first.
        fp32_products: where fp32 operands are multiplied, the most FLOPs first.
        collectives: the most bytes first.
        attention: kernels, and arrays of scores.
        copied_bytes: written by copies that change layouts, on one chip.
        padding_bytes: what tiles add to the arrays of the program, on one chip.
        unknown: what could not be counted, in sentences.
    """

    model_flops: int
    chip_flops: int = 0
    hbm_bytes: int = 0
    products: tuple[Product, ...] = ()
    fp32_products: tuple[Product, ...] = ()
    collectives: tuple[Moved, ...] = ()
    attention: tuple[Attention, ...] = ()
    copied_bytes: int = 0
    padding_bytes: int = 0
    unknown: tuple[str, ...] = ()

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that a chip hands on in a step, by kind of collective."""
        found: dict[str, int] = {}
        for one in self.collectives:
            found[one.kind] = found.get(one.kind, 0) + one.bytes
        return found


@dataclass(frozen=True)
class Captured:
    """A constant of the host that the program holds.

    Attributes:
        name: where it comes from, as far as that is known.
        shape: dtype and sizes.
        bytes: its size.
    """

    name: str
    shape: str
    bytes: int


@dataclass(frozen=True)
class Seconds:
    """How long each stage took on this machine."""

    trace: float
    lower: float
    compile: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.trace + self.lower + self.compile
