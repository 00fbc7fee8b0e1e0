"""`python -m benchmarks.generation_ahead`: milliseconds a token of Llama 3.1 8B on v6e.

Compiles the decode program of `generate` as `tpuport.compile_for` does; no TPU is needed, and no
weight. Prints the table of docs/generation.md: the time of a round of the loop by the report's
estimate, beside the time in which the HBM can read the weights and the cache once.
"""

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList

import tpuport
from tpuport.aot.abstract_model import spread_out
from tpuport.aot.aot import compile_ahead
from tpuport.aot.entry_points import forward_step
from tpuport.aot.memory import read_memory
from tpuport.cost import chip_of, estimate_step, read_compiled
from tpuport.cost.hlo.parser import HloProgram, read_program
from tpuport.cost.hlo_traffic import traffic
from tpuport.generation import programs
from tpuport.generation.generate import PREFIX, bucketed
from tpuport.generation.structures import put_together, taken_apart

PROMPT, NEW = 960, 64
_NO_WORK = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"}


def llama(layers: int) -> Any:
    """Make Llama 3.1 8B in bfloat16, without weights."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
        bos_token_id=128000, eos_token_id=128001, pad_token_id=128001,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16().eval()


def decode_arguments(model: Any, batch: int) -> tuple[Any, ...]:
    """Return the arguments of the decode program after a prompt, as shapes.

    Args:
        model: The model, on the meta device.
        batch: How many sequences.
    """
    length = bucketed(PROMPT + NEW)
    with torch.device("meta"), torch.no_grad():
        ids = torch.zeros(batch, PROMPT, dtype=torch.long)
        given = {"position_ids": ids, "logits_to_keep": 1, "use_cache": True}
        logits, leaves, name = programs.prefill(model, ids, given, "past_key_values", length)
        counts = (torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long))
        ends = (torch.zeros(1, dtype=torch.long), torch.zeros((), dtype=torch.long))
        room = torch.zeros(batch, length, dtype=torch.long)
    given = put_together(leaves, name)
    for layer in given["past_key_values"].layers:
        # What a step makes on the cache's device has values.
        layer.device = torch.device("cpu")
    processing = taken_apart(LogitsProcessorList(), "none")
    return logits, room, counts, taken_apart(given, "the cache"), processing, ends, False


def least_bytes(model: Any, given: dict[str, Any]) -> int:
    """Return the bytes of the weights that a token reads, and of the cache."""
    read = [p for n, p in model.named_parameters() if "embed_tokens" not in n]
    cached = [t for one in given["past_key_values"].layers for t in (one.keys, one.values)]
    return sum(t.numel() * t.element_size() for t in (*read, *cached))


def bytes_of_a_call(program: HloProgram) -> int:
    """Return what is read and written outside of the loop, such as a copy of the cache."""
    entry = program.entry
    work = (one for one in entry.instructions.values() if one.opcode not in _NO_WORK)
    return sum(
        traffic(program, entry, one)
        for one in work
        if not one.opcode.endswith(("-done", "-update"))
    )


def row(layers: int, topology: str, batch: int, rules: str) -> str:
    """Return a row of the table."""
    model = llama(layers)
    ported = tpuport.convert(model, methods=("generate",), verify=False)
    inputs = decode_arguments(model, batch)
    chips = int(topology.rpartition("-")[2])
    mesh = {"tensor": chips} if chips > 1 else None
    # As compile_for does. Weights in stacks would be cut apart again before the loop.
    spread, _ = spread_out(ported, topology, mesh, rules, stack=False)
    devices: Any = spread._placement.mesh
    ahead = compile_ahead(forward_step(spread, PREFIX + "decode", inputs), devices)
    device = devices.devices.flat[0]
    text = None if ahead.compiled is None else ahead.compiled.as_text()
    program = None if text is None else read_program(text)
    peak = read_memory(ahead, program, device).peak / 2**30
    cells = [topology, str(batch), f"{peak:.1f} GiB"]
    if text is None or program is None:
        return " | ".join([*cells, "does not fit", "", ""])
    chip, found = chip_of(device.device_kind), read_compiled(text)
    took = estimate_step(
        chip,
        dense_flops=found.dot_flops,
        dense_peak=chip.bf16_flops,
        hbm_bytes=found.hbm_bytes - bytes_of_a_call(program),
        collectives=found.collectives,
        kernel_seconds=0.0,
    )
    parts = ", ".join(f"{one.name} {one.seconds * 1e3:.2f}" for one in took.parts if one.seconds)
    least = least_bytes(model, put_together(*inputs[3])) / chips / chip.hbm_bandwidth
    cells += [f"{took.seconds * 1e3:.2f} ({parts})", f"{least * 1e3:.2f}"]
    return " | ".join([*cells, f"{took.seconds / least:.2f}"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--topology", nargs="+", default=["v6e-1", "v6e-8"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--rules", default="tensor_parallel", help="for more than one chip")
    given = parser.parse_args()
    print("| slice | batch | held a chip | ms a token | least | times |")
    print("|---|---|---|---|---|---|")
    for topology in given.topology:
        for batch in given.batch:
            print(f"| {row(given.layers, topology, batch, given.rules)} |", flush=True)


if __name__ == "__main__":
    main()
