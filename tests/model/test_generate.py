"""`generate` of transformers: equal tokens, and no program more for another number of tokens."""

from typing import Any

import pytest
import torch

import tpuport
from tpuport.foundation.errors import UsageError

transformers = pytest.importorskip("transformers")
COMMON = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
    "pad_token_id": 0, "eos_token_id": 5, "bos_token_id": 1,
}  # fmt: skip


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON)).eval()


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=256, eos_token_id=5
    )
    return transformers.GPT2LMHeadModel(config).eval()


def gemma3() -> Any:
    more = {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention"]}
    config = transformers.Gemma3TextConfig(**(COMMON | more))
    return transformers.Gemma3ForCausalLM(config).eval()


def mamba() -> Any:
    config = transformers.MambaConfig(
        vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=1, eos_token_id=5
    )
    return transformers.MambaForCausalLM(config).eval()


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=61, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        decoder_start_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def prompt(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return two sequences, the first with padding at the left."""
    ids = torch.randint(6, 61, (2, 7), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def check_greedy(model: Any) -> None:
    ported = tpuport.convert(model, methods=("generate",))
    for seed, count in ((0, 9), (1, 24), (0, 1)):
        given = {**prompt(seed), "max_new_tokens": count}
        got = tpuport.to_torch(ported.generate(**given))
        assert torch.equal(got, model.generate(**given))
    assert not ported.report.retraces


def test_greedy_of_other_lengths_prompts_and_weights() -> None:
    model = llama()
    check_greedy(model)
    ported = tpuport.convert(model, methods=("generate",))
    given = {**prompt(), "max_new_tokens": 9}
    before = ported.generate(**given)
    other = llama()
    torch.nn.init.normal_(other.lm_head.weight, std=0.5)
    ported.load(other.state_dict())
    after = tpuport.to_torch(ported.generate(**given))
    assert torch.equal(after, other.generate(**given))
    assert not torch.equal(after, tpuport.to_torch(before))


def test_sequences_end() -> None:
    model = llama()
    end = int(model.generate(**prompt(), max_new_tokens=5)[1, -2])
    ported = tpuport.convert(model, methods=("generate",), verify="always")
    for least in (None, 6):
        given = {**prompt(), "max_new_tokens": 9, "eos_token_id": end, "min_new_tokens": least}
        assert torch.equal(tpuport.to_torch(ported.generate(**given)), model.generate(**given))


def test_sampling_draws_what_eager_draws_in_the_comparison() -> None:
    ported = tpuport.convert(llama(), methods=("generate",))
    given = {**prompt(), "max_new_tokens": 9, "do_sample": True, "top_k": 20, "top_p": 0.9,
             "temperature": 0.8, "repetition_penalty": 1.2}  # fmt: skip
    first = tpuport.to_torch(ported.generate(**given))  # raises if a token differs
    assert ported.report.verified
    assert not torch.equal(first, tpuport.to_torch(ported.generate(**given)))


@pytest.mark.parametrize(
    "asked",
    [{"num_beams": 2}, {"return_dict_in_generate": True}, {"max_time": 1.0}, {"use_cache": False}],
    ids=str,
)
def test_what_is_refused_is_named(asked: dict[str, Any]) -> None:
    ported = tpuport.convert(llama(), methods=("generate",), verify=False)
    with pytest.raises(UsageError, match="not supported by generate as a program"):
        ported.generate(**prompt(), max_new_tokens=4, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, gemma3, mamba, t5])
def test_other_models(make: Any) -> None:
    torch.manual_seed(0)
    check_greedy(make())
