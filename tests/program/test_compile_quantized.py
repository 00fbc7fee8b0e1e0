"""Quantized programs for a TPU: memory falls with the bits, and no weight is put together whole."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import tpuport
from tests.program.small import needs_libtpu
from tpuport.aot.abstract_model import spread_out
from tpuport.aot.aot import compile_ahead
from tpuport.aot.compile_for import compile_for
from tpuport.aot.entry_points import forward_step
from tpuport.cost.hlo.parser import read_program
from tpuport.quantization import QuantizationScheme

pytestmark = needs_libtpu

SCHEMES = {
    "w8a8": QuantizationScheme(8, 8),
    "w4a8": QuantizationScheme(4, 8),
    "w4a16": QuantizationScheme(4, 16, group=128),
    "duquant": QuantizationScheme(4, 8, method="duquant"),
}
INPUTS = {"input_ids": torch.zeros(1, 128, dtype=torch.int32), "use_cache": False}


def llama(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, vocab_size=1024,
        num_attention_heads=16, num_key_value_heads=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model


def ported(name: str, layers: int) -> tpuport.PortedModel:
    model = llama(layers)
    if name == "float":
        return tpuport.convert(model)
    return tpuport.quantize(model, SCHEMES[name], keep=["lm_head"])


def elements_of(model: tpuport.PortedModel) -> dict[str, int]:
    """Return the number of elements of each quantized weight."""
    layers = model.quantization.layers  # pyright: ignore[reportAttributeAccessIssue]
    return {one.name: math.prod(one.shape) for one in layers}


def whole_weights(program: Any, least: int) -> list[str]:
    """Return the arrays of a program's memory, arguments apart, with a weight's elements."""
    fusions = (one for one in program.instructions() if one.opcode == "fusion")
    fused = {name.lstrip("%") for one in fusions for name in one.called("calls")}
    views = ("parameter", "bitcast", "get-tuple-element", "tuple", "while")
    return [
        f"{one.name}: {one.shape}"
        for name, computation in program.computations.items()
        if name.lstrip("%") not in fused
        for one in computation.instructions.values()
        if one.opcode not in views
        if any(array.space == 0 and array.size >= least for array in one.results)
    ]


@pytest.mark.parametrize(
    "name",
    ["w4a16", *(pytest.param(n, marks=pytest.mark.slow) for n in ("w8a8", "w4a8", "duquant"))],
)
def test_no_weight_is_put_together_whole(name: str):
    model, _ = spread_out(ported(name, 1), "v6e-1", None, "fsdp")
    mesh: Any = model.mesh
    ahead = compile_ahead(forward_step(model, "forward", INPUTS), mesh, {})
    sizes = elements_of(model)
    program = read_program(ahead.compiled.as_text())
    assert whole_weights(program, min(sizes.values())) == []
    # The same search finds the logits, which are smaller.
    assert whole_weights(program, 128 * 1024)
    assert ahead.compiled.memory_analysis().temp_size_in_bytes < 2 * min(sizes.values())


@pytest.mark.slow
def test_memory_and_flops_are_those_of_the_bits():
    reports = {
        name: compile_for(ported(name, 2), "v6e-1", inputs=INPUTS) for name in ("float", *SCHEMES)
    }
    kept = 2 * 1024 * 2048 * 2
    weights = {
        name: one.memory.parameters + one.memory.buffers - kept for name, one in reports.items()
    }
    assert weights["float"] > 1.95 * weights["w8a8"]
    assert weights["float"] > 3.9 * weights["w4a8"]
    assert weights["float"] > 3.6 * weights["w4a16"]
    assert weights["float"] > 3.6 * weights["duquant"]
    by_type = {
        name: {one.dtypes: one.flops for one in report.work.products if report.work}
        for name, report in reports.items()
        if report.work
    }
    total = by_type["float"]["bfloat16 x bfloat16"]
    for name in ("w8a8", "w4a8"):
        assert by_type[name]["int8 x int8"] > 0.95 * total
    assert by_type["w4a16"] == {"bfloat16 x bfloat16": total}
    # Rotations of blocks of 16 are in float32, and few beside the products.
    assert 0 < by_type["duquant"]["float32 x float32"] < 0.02 * total
