"""`generate` of transformers: equal tokens, and no program more for another number of tokens."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tpuport
from tpuport.foundation.errors import ParityError, UsageError
from tpuport.generation import generate, timestamps

transformers = pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs/generation.md"
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


def llava() -> Any:
    text = transformers.LlamaConfig(**COMMON)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=60)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


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
    given: dict[str, Any] = {**prompt(), "repetition_penalty": 1.3}
    end = int(model.generate(**given, max_new_tokens=5)[1, -2])
    given = {**given, "max_new_tokens": 9, "eos_token_id": end}
    ported = tpuport.convert(model, methods=("generate",), verify="always")
    for least in (None, 6):
        want = model.generate(**given, min_new_tokens=least)
        got = ported.generate(**given, min_new_tokens=least)
        assert torch.equal(tpuport.to_torch(got), want)


def test_the_example_of_the_page_draws_what_eager_draws() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    given = prompt()
    names = {"tpuport": tpuport, "model": llama(), "ids": given["input_ids"],
             "mask": given["attention_mask"]}  # fmt: skip
    exec(code[1], names)  # raises if a token differs
    ported, first = names["ported"], tpuport.to_torch(names["ids"])
    assert ported.report.verified
    assert (first[:, :7] == given["input_ids"]).all()
    again = ported.generate(**given, max_new_tokens=40, do_sample=True, top_p=0.9)
    assert not torch.equal(first, tpuport.to_torch(again))


@pytest.mark.parametrize(
    "asked",
    [
        {"num_beams": 2},
        {"return_dict_in_generate": True},
        {"max_time": 1.0},
        {"use_cache": False},
        {"no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_what_is_refused_is_named(asked: dict[str, Any]) -> None:
    ported = tpuport.convert(llama(), methods=("generate",), verify=False)
    with pytest.raises(UsageError, match="not supported by generate as a program"):
        ported.generate(**prompt(), max_new_tokens=4, **asked)


class Prepares(transformers.LlamaForCausalLM):
    """A model that computes with its weights before generation."""

    def _prepare_model_inputs(self, inputs: Any, *args: Any) -> Any:
        self.lm_head(torch.zeros(16))
        return super()._prepare_model_inputs(inputs, *args)


def test_weights_are_not_used_on_the_host() -> None:
    model = Prepares(transformers.LlamaConfig(**COMMON)).eval()
    ported = tpuport.convert(model, methods=("generate",), verify=False)
    with pytest.raises(UsageError, match="a model that calls Linear before its tokens"):
        ported.generate(**prompt(), max_new_tokens=4)


def test_the_copy_for_preparations_is_kept_until_something_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    original = generate.clone_module
    monkeypatch.setattr(generate, "clone_module", lambda *a: made.append(a) or original(*a))
    ported = tpuport.convert(llama(), methods=("generate",), verify=False)
    given = {**prompt(), "max_new_tokens": 6}

    def check(copies: int) -> torch.Tensor:
        before = len(made)
        got = tpuport.to_torch(ported.generate(**given))
        assert torch.equal(got, ported.to_torch().generate(**given))
        assert len(made) - before == copies
        return got

    first = check(1)
    check(0)
    module = ported.module
    check(1)
    module.generation_config.eos_token_id = int(first[1, 8])
    assert not torch.equal(check(1), first)
    check(0)
    module.config.new = 1
    check(1)
    module.model.layers[0].mlp.note = 1
    check(1)
    with torch.no_grad():
        module.lm_head.weight.mul_(-1)
    check(0)  # values are no part of the copy
    check(0)
    ported.train()
    with pytest.raises(UsageError, match="training mode"):
        ported.generate(**given)
    ported.eval()
    check(1)


class Counts(transformers.LlamaForCausalLM):
    """A model whose preparations change it."""

    def _prepare_model_inputs(self, inputs: Any, *args: Any) -> Any:
        self.config.calls = [*getattr(self.config, "calls", []), 1]
        assert len(self.config.calls) == 1
        return super()._prepare_model_inputs(inputs, *args)


def test_each_call_is_prepared_on_the_module_as_it_was() -> None:
    model = Counts(transformers.LlamaConfig(**COMMON)).eval()
    ported = tpuport.convert(model, methods=("generate",), verify=False)
    found = [tpuport.to_torch(ported.generate(**prompt(), max_new_tokens=2)) for _ in range(3)]
    # Eager PyTorch's own call changes the model, and so comes last.
    expected = model.generate(**prompt(), max_new_tokens=2)
    for one in found:
        assert torch.equal(one, expected)
    assert not hasattr(ported.module.config, "calls")


def test_other_tokens_are_an_error_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    ported = tpuport.convert(model, methods=("generate",))
    given = {**prompt(), "max_new_tokens": 2}
    # In place of both programs: tokens that eager does not choose.
    wrong = 60 - model.generate(**given)
    monkeypatch.setattr(generate.TextGeneration, "__call__", lambda self, args, kwargs: wrong)
    with pytest.raises(ParityError, match=r"(?s)not searched for, because generate .*call forward"):
        ported.generate(**given)


@pytest.mark.slow
def test_sampling_with_all_processors() -> None:
    ported = tpuport.convert(llama(), methods=("generate",), verify="always")
    for temperature in (0.8, 1.5):
        given = {**prompt(), "max_new_tokens": 9, "do_sample": True, "top_k": 20, "top_p": 0.9,
                 "temperature": temperature, "repetition_penalty": 1.2}  # fmt: skip
        ported.generate(**given)  # raises if a token differs
    assert ported.report.verified


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, gemma3, mamba, t5])
def test_other_models(make: Any) -> None:
    torch.manual_seed(0)
    check_greedy(make())


@pytest.mark.slow
def test_images_are_encoded_with_the_weights_of_the_port() -> None:
    torch.manual_seed(0)
    model, other = llava(), llava()
    ids = torch.tensor([[1, 60, 60, 60, 60, 9, 11]])
    given = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 8, 8), "max_new_tokens": 6}
    ported = tpuport.convert(model, methods=("generate",))
    ported.generate(**given)
    # Only what encodes images has other weights.
    values = {n: v for n, v in model.state_dict().items() if n.startswith(("lm_", "model.lang"))}
    other.load_state_dict(values, strict=False)
    ported.load(other.state_dict())
    after = other.generate(**given)
    assert not torch.equal(after, model.generate(**given))
    assert torch.equal(tpuport.to_torch(ported.generate(**given)), after)


def whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8,
        max_source_positions=30, max_target_positions=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    asked = model.generation_config
    asked.suppress_tokens, asked.begin_suppress_tokens = [5, 6], [2, 7]
    asked.no_timestamps_token_id, asked.max_initial_timestamp_index = 40, 5
    asked.is_multilingual, asked.task_to_id = True, {"transcribe": 13, "translate": 14}
    asked.lang_to_id = {"<|en|>": 10, "<|de|>": 11, "<|fr|>": 12}
    torch.manual_seed(3)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5 if weight.dim() > 1 else 0.1)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frames", "asked"),
    [(60, {"language": "de"}), (60, {}), (150, {"return_timestamps": True})],
    ids=["short", "detected", "long"],
)
def test_speech_by_code_of_its_own_around_generate(frames: int, asked: dict[str, Any]) -> None:
    model = whisper()
    ported = tpuport.convert(model, methods=("generate",), verify=False)
    speech = torch.randn(2, 8, frames, generator=torch.Generator().manual_seed(0))
    given = {"input_features": speech, "attention_mask": torch.ones(2, frames).long(), **asked}
    for count in (12, 30):
        got = ported.generate(**given, max_new_tokens=count)
        assert torch.equal(tpuport.to_torch(got), model.generate(**given, max_new_tokens=count))


def test_rules_of_timestamps_are_those_of_transformers() -> None:
    drawn = torch.Generator().manual_seed(0)
    model = whisper()
    for asked in (5, None):
        model.generation_config.max_initial_timestamp_index = asked
        original = transformers.WhisperTimeStampLogitsProcessor(model.generation_config, 3)
        traced = timestamps.TracedTimestamps(original)
        for count in (3, 4, 5, 6, 9) * 8:
            ids = torch.randint(30, 64, (4, count), generator=drawn)
            scores = torch.randn(4, 64, generator=drawn) * 3
            assert torch.equal(traced(ids, scores), original(ids, scores))
