"""Models of transformers, diffusers and hyvideo with their masks: attention by kernels gives what
eager PyTorch gives, in value and gradient, and nothing of the scores' size is computed.
"""

import importlib.util
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    Qwen2Config,
    Qwen2Model,
    T5Config,
    T5Model,
)

import tpuport
from tests.attention_call.programs import KERNELS, SMALL, gradient_program, of_scores_size, program
from tests.upstream.test_hyvideo import script

pytestmark = [
    pytest.mark.filterwarnings("ignore::tpuport.kernels.attention.dispatch.AttentionWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]

B, S = 2, 40
SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
T5: dict[str, Any] = {
    "vocab_size": 31,
    "d_model": 16,
    "d_ff": 24,
    "d_kv": 4,
    "num_layers": 1,
    "num_heads": 4,
}


def _prompts(left: bool = True) -> dict[str, Any]:
    keep = torch.ones(B, S, dtype=torch.long)
    if left:
        keep[1, :7] = 0
    else:
        keep[1, -7:] = 0
    return {"input_ids": torch.randint(3, 31, (B, S)), "attention_mask": keep}


def _sentences() -> dict[str, Any]:
    given = _prompts(left=False)
    return given | {"decoder_input_ids": torch.randint(3, 31, (B, S))}


MODELS: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "Llama": (
        lambda: LlamaModel(LlamaConfig(**GROUPED, use_cache=False)),
        _prompts,
        {"causal, padded keys": "splash"},
    ),
    "Qwen2": (
        lambda: Qwen2Model(Qwen2Config(**GROUPED, use_cache=False)),
        lambda: {"input_ids": _prompts()["input_ids"]},
        {"causal": "splash"},
    ),
    "Mistral": (
        lambda: MistralModel(MistralConfig(**GROUPED, use_cache=False, sliding_window=9)),
        _prompts,
        {"window -8 to 0, padded keys": "splash"},
    ),
    "Bert": (
        lambda: BertModel(BertConfig(**SIZES), add_pooling_layer=False),
        _prompts,
        {"padded keys": "splash"},
    ),
    "T5": (
        lambda: T5Model(T5Config(**T5, use_cache=False, decoder_start_token_id=0)),
        _sentences,
        {"bias": "blockwise"},
    ),
}


# Kernels by model, and those whose gradients are compared too.
CALLS = [(name, kernel) for name in MODELS for kernel in KERNELS]
TRAINED = {("Llama", "splash"), ("Bert", "blockwise"), ("T5", "blockwise")}


@pytest.mark.parametrize(("name", "kernel"), CALLS)
def test_transformers(name: str, kernel: str):
    torch.manual_seed(0)
    build, make, expected = MODELS[name]
    model, given = build().eval(), make()
    trained = (name, kernel) in TRAINED
    with tpuport.attention_options(**KERNELS[kernel]):
        ported = tpuport.convert(model, verify=not trained)
        if trained:
            ported.verify(**given)
            backward = gradient_program(ported, lambda out: out[0].sum(), **given)
        else:
            ported(**given)
    assert ported.report.ok, ported.report
    served = {call.mask: call.kernel for call in ported.report.attention}
    assert served == (expected if kernel == "splash" else dict.fromkeys(expected, "blockwise"))
    # A tile of T5's beside splash is larger than the sequence, and a bias that is learned is
    # differentiated as the array that it is.
    if name != "T5" or kernel == "blockwise":
        assert of_scores_size(program(ported), S) == []
    if name != "T5" and trained:
        assert of_scores_size(backward, S) == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_diffusers_hunyuan_video(kernel: str):
    from tests.zoo import diffusers_videos

    cases = (c for v in vars(diffusers_videos).values() if isinstance(v, list) for c in v)
    case = next(c for c in cases if str(c) == "HunyuanVideo15Transformer3DModel-image")
    model, given = case.make()
    with tpuport.attention_options(**KERNELS[kernel]):
        ported = tpuport.convert(model)
        ported(**given)
    assert ported.report.ok, ported.report
    assert {(c.kernel, c.mask) for c in ported.report.attention} == {
        (kernel, "padded keys, padded queries")
    }
    longest = max(call.key[2] for call in ported.report.attention)
    assert longest > SMALL.q
    # Its byT5 projection is 2048 wide, more than the scores of so few tokens laid end to end.
    found = of_scores_size(program(ported), longest)
    assert [shape for shape in found if 2048 not in shape] == []


@pytest.mark.skipif(
    importlib.util.find_spec("hyvideo") is None,
    reason="waits for hyvideo: pip install --no-deps hyvideo-fork",
)
@pytest.mark.parametrize("mode", ["torch", "flash"])
def test_hyvideo(mode: str):
    from tpuport.compat.emulated.programs import programs

    with script() as module, tpuport.attention_options(**KERNELS["splash"]):
        model = module.build("cuda", attn_mode=mode, mm_double_blocks_depth=1)
        with torch.no_grad():
            model(**module.inputs("cuda", vision="none"))
        (report,) = [one.report for one in programs()]
        assert report.ok, report
    # One program for all masks: as many rows are packed as there may be, the last of them padding.
    packed, whole = "segments, padded keys, padded queries", "padded keys, padded queries"
    assert {(c.kernel, c.mask) for c in report.attention} == {
        "torch": {("splash", packed), ("splash", whole)},
        "flash": {("splash", packed)},
    }[mode]


@pytest.mark.parametrize("kernel", KERNELS)
def test_repeated_blocks_know_their_masks(kernel: str):
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes: dict[str, Any] = GROUPED | {"num_hidden_layers": 4, "head_dim": 4, "layer_types": kinds}
    model = Gemma3TextModel(Gemma3TextConfig(**sizes, sliding_window=9, use_cache=False)).eval()
    with tpuport.attention_options(**KERNELS[kernel]):
        ported = tpuport.convert(model, blocks="scan")
        ported(**_prompts())
    assert ported.report.ok, ported.report
    served = {(call.kernel, call.mask) for call in ported.report.attention}
    assert served == {(kernel, "window -8 to 0, padded keys"), (kernel, "causal, padded keys")}
    assert of_scores_size(program(ported), S) == []
