"""The program or an array does not fit into memory."""

import re

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded

_UNITS = {"B": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = r"([\d.]+)([BKMGT])"
# Wanted and available.
_PAIRS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"Used {_SIZE} of {_SIZE} (\w+)",
        rf"\({_SIZE}\) exceeds available (HBM) \({_SIZE}\)",
        rf"Attempting to (?:allocate|reserve) {_SIZE}.*?There are {_SIZE} free",
    )
)
_WANTED = re.compile(r"(?:allocat(?:e|ing)|tried to allocate) (\d+) bytes")
_BUFFER = re.compile(rf"^  \d+\. Size: {_SIZE}\n((?:     .+\n)+)", re.MULTILINE)
_FACT = re.compile(r"^     (Operator|Shape|Allocation type|Tag): (.+)$", re.MULTILINE)
_OPERATION = re.compile(r'op_name="([^"]*)"(?: source_file="([^"]*)" source_line=(\d+))?')
_SHOWN = 3

_REMEDIES = (
    "make the batch, the resolution or the sequence smaller; accumulate gradients over parts",
    "store less for the backward pass: wrap a block in jax.checkpoint"
    " (torch.utils.checkpoint keeps every activation under jax.grad)",
    "hold weights and activations in bfloat16, half of float32: model.to(torch.bfloat16)",
    "spread parameters and activations over the chips of a mesh, and donate what the step replaces"
    " (donate_argnums)",
)
_VMEM = (
    "make the blocks of the Pallas kernel smaller (BlockSpec): its windows have to fit into the"
    " chip's vector memory together",
    "or allow it more: --xla_tpu_scoped_vmem_limit_kib in LIBTPU_INIT_ARGS",
)


class OutOfMemory(Cause):
    """The memory of the chip, or of the host, is too small.

    The TPU compiler plans all memory of a program ahead, so a program that is too large fails when
    it is compiled, with a list of its largest buffers. An array that does not fit into the
    remaining memory fails when it is made.
    """

    RULES = ("TPU610", "TPU516")
    RECORDED = (
        Recorded(
            "jax.errors.JaxRuntimeError",
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO"
            " temporaries (64.03G) exceeds available HBM (15.75G).",
            "a program of 64 GiB compiled for one TPU v5e (libtpu 0.0.42.1)",
            "the program needs 64.03 GiB of hbm and 15.75 GiB are there",
        ),
        Recorded(
            "jax.errors.JaxRuntimeError",
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space"
            " vmem. Used 256.00M of 128.00M vmem. Exceeded vmem capacity by 128.00M.\n\nProgram"
            " vmem requirement 256.00M:\n    scoped          256.00M\n\n  Largest program"
            ' allocations in vmem:\n\n  1. Size: 128.00M\n     Operator: op_name="jit(<lambda>)/'
            'pallas_call"\n     Shape: u8[134217728]{0}\n     Unpadded size: 128.00M\n     Tag:'
            " input window allocation for operator input 0.\n     Allocation type: scoped\n"
            "     ==========================\n",
            "a Pallas kernel over an array of 128 MiB in one block, compiled for TPU v5e",
            "the program needs 256.0 MiB of vmem and 128.0 MiB are there",
        ),
        Recorded(
            "jaxlib.xla_extension.XlaRuntimeError",
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space"
            " hbm. Used 63.80G of 30.75G hbm. Exceeded hbm capacity by 33.05G.\n\nTotal hbm usage"
            " >= 65.05G:\n    reserved          1.25G\n    program          63.80G\n\n  Largest"
            ' program allocations in hbm:\n\n  1. Size: 2.00G\n     Operator: op_name="jit(step)/'
            'transformer/h/0/dot_general" source_file="/src/attention.py" source_line=1059\n'
            "     Shape: f32[32,4096,4096]{1,2,0:T(8,128)}\n     Unpadded size: 2.00G\n"
            "     Allocation type: HLO temp\n     ==========================\n",
            "https://github.com/erfanzar/EasyDeL/issues/166, shortened",
            "the program needs 63.80 GiB of hbm and 30.75 GiB are there",
        ),
        Recorded(
            "jaxlib.xla_extension.XlaRuntimeError",
            "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 15.65G."
            " That was not possible. There are 11.08G free.; (0x0x0_HBM0)",
            "https://github.com/google-deepmind/gemma/issues/85",
            "an array needs 15.65 GiB of device memory and 11.08 GiB are free",
        ),
        Recorded(
            "jax.errors.JaxRuntimeError",
            "RESOURCE_EXHAUSTED: Out of memory allocating 35184372088832 bytes.",
            "`jnp.zeros((2**45,), jnp.uint8)` on the CPU",
            "an array needs 32.0 TiB of memory, more than there is",
        ),
        Recorded(
            "builtins.RuntimeError",
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"
            " memory: you tried to allocate 281474976710656 bytes. Error code 12 (Cannot allocate"
            " memory)",
            "`torch.empty(2**46)`",
            "an array needs 256.0 TiB of memory, more than there is",
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain the error, with the memory needed and available and the largest buffers."""
        message = raised.message
        if not raised.says("RESOURCE_EXHAUSTED", "DefaultCPUAllocator: can't allocate memory"):
            return None
        space, problem = self._problem(message)
        return Explanation(
            problem,
            _VMEM if space == "vmem" else _REMEDIES,
            None,
            tuple(_buffers(message)),
        )

    @staticmethod
    def _problem(message: str) -> tuple[str, str]:
        used, exceeds, free = (pattern.search(message) for pattern in _PAIRS)
        if used:
            space = used[5]
            wanted, there = _size(used[1], used[2]), _size(used[3], used[4])
            return space, f"the program needs {wanted} of {space} and {there} are there"
        if exceeds:
            wanted, there = _size(exceeds[1], exceeds[2]), _size(exceeds[4], exceeds[5])
            return "hbm", f"the program needs {wanted} of hbm and {there} are there"
        if free:
            wanted, there = _size(free[1], free[2]), _size(free[3], free[4])
            return "hbm", f"an array needs {wanted} of device memory and {there} are free"
        asked = _WANTED.search(message)
        if asked:
            return "host", f"an array needs {_bytes(int(asked[1]))} of memory, more than there is"
        return "", "there is not enough memory"


def _size(number: str, unit: str) -> str:
    """Format a size of the compiler's message with its unit as MiB, GiB and so on."""
    digits = number if unit in "GT" else f"{float(number):.1f}"
    return f"{digits} {unit}iB" if unit != "B" else f"{number} B"


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for unit in _UNITS:
        if value < 1024 or unit == "T":
            break
        value /= 1024
    return f"{value:.1f} {unit}iB" if unit != "B" else f"{count} B"


def _buffers(message: str) -> list[str]:
    """Describe the largest buffers of the compiler's list, one per line."""
    lines = []
    for number, unit, body in _BUFFER.findall(message)[:_SHOWN]:
        facts = dict(_FACT.findall(body))
        operation = _OPERATION.search(facts.get("Operator", ""))
        parts = [f"{_size(number, unit)} {facts.get('Shape', '').partition('{')[0]}".rstrip()]
        if operation and operation[1]:
            parts.append(f"by {operation[1]}")
        if operation and operation[2]:
            parts.append(f"at {operation[2]}:{operation[3]}")
        if "Tag" in facts:
            parts.append(f"({facts['Tag'].partition('.')[0]})")
        lines.append(" ".join(parts))
    return [f"largest buffers: {lines[0]}", *lines[1:]] if lines else []
