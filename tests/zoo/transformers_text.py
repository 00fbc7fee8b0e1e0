"""Language models of transformers: prompts padded on both sides, odd lengths, small windows."""

from typing import Any

import torch
from transformers import DynamicCache

from tests.zoo.case import keep, transformers_case

VOCABULARY = 31
SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = SPECIAL | {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
}
DECODER = ENCODER | {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = DECODER | {"num_experts_per_tok": 2, "moe_intermediate_size": 8}

# Its other attention, by hashing, sorts by numbers beyond int32, which jax holds integers in.
_REFORMER = SPECIAL | {
    "attn_layers": ["local"],
    "hidden_size": 16,
    "num_attention_heads": 2,
    "attention_head_size": 8,
    "feed_forward_size": 20,
    "local_attn_chunk_length": 4,
    "axial_pos_shape": [4, 4],
    "axial_pos_embds_dim": [6, 10],
}


def tokens(batch: int = 2, length: int = 7) -> torch.Tensor:
    """Token ids without the special ones (the first four, and the last three, for pictures)."""
    return torch.randint(4, VOCABULARY - 3, (batch, length))


def prompts(length: int = 7, dtype: torch.dtype = torch.long) -> dict[str, Any]:
    """Two prompts for a decoder: the first padded on the left, the second on the right."""
    left = keep(length - 3, size=length, left=True, dtype=dtype)
    right = keep(length - 2, size=length, dtype=dtype)
    return {"input_ids": tokens(2, length), "attention_mask": torch.cat([left, right])}


def sentences(length: int = 7) -> dict[str, Any]:
    """Two sentences for an encoder, the first padded."""
    return {"input_ids": tokens(2, length), "attention_mask": keep(length - 3, length, size=length)}


def pairs() -> dict[str, Any]:
    """Two pairs of sentences: the later tokens of each row are of the second sentence."""
    return sentences() | {"token_type_ids": 1 - keep(2, 3, size=7)}


def labelled() -> dict[str, Any]:
    """Prompts with the next-token loss, not counted on padding."""
    batch = prompts()
    hidden = batch["attention_mask"] == 0
    return batch | {"labels": batch["input_ids"].masked_fill(hidden, -100)}


def continued() -> dict[str, Any]:
    """Two more tokens after five cached ones; the first prompt was padded on the left."""
    cache = DynamicCache()
    cache.update(torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4), layer_idx=0)
    mask = keep(5, 7, size=7, left=True)
    return {"input_ids": tokens(2, 2), "attention_mask": mask, "past_key_values": cache}


def translations() -> dict[str, Any]:
    """Sentences with a decoder's prompt, the latter padded on the right."""
    return sentences() | {
        "decoder_input_ids": tokens(2, 5),
        "decoder_attention_mask": keep(5, 3, size=5),
    }


DECODERS = [
    transformers_case("LlamaForCausalLM", DECODER, labelled, grads=True),
    transformers_case("LlamaModel", DECODER, continued, note="cached"),
    transformers_case(
        "Qwen2Model",
        DECODER
        | {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 3}
        | {"max_window_layers": 1},
        prompts,
    ),
    transformers_case(
        "Qwen3MoeForCausalLM",
        EXPERTS | {"num_experts": 4, "head_dim": 8, "output_router_logits": True},
        labelled,
        grads=True,
    ),
    transformers_case(
        "Qwen3NextModel",
        EXPERTS
        | {"num_experts": 4, "head_dim": 8, "shared_expert_intermediate_size": 8}
        | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        | {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4},
        prompts,
    ),
    transformers_case("MixtralModel", DECODER | {"num_local_experts": 4}, prompts),
    transformers_case(
        "DeepseekV3Model",
        EXPERTS
        | {"num_hidden_layers": 2, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2}
        | {"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
        prompts,
        grads=True,
    ),
    transformers_case(
        "GptOssModel",
        DECODER
        | {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
        | {"sliding_window": 3},
        prompts,
        grads=True,
    ),
    transformers_case(
        "Gemma3TextModel",
        DECODER
        | {"num_hidden_layers": 2, "head_dim": 4, "sliding_window": 3, "query_pre_attn_scalar": 4}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        prompts,
    ),
    transformers_case("PhiModel", DECODER | {"partial_rotary_factor": 0.5}, prompts),
    transformers_case(
        "GPT2LMHeadModel",
        SPECIAL | {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 12},
        labelled,
    ),
    transformers_case("OPTModel", ENCODER | {"ffn_dim": 20, "word_embed_proj_dim": 12}, prompts),
    transformers_case(
        "BloomModel", SPECIAL | {"hidden_size": 16, "n_head": 2, "n_layer": 1}, prompts
    ),
    transformers_case(
        "FalconModel",
        ENCODER | {"alibi": True, "new_decoder_architecture": False, "multi_query": False},
        prompts,
    ),
    transformers_case(
        "MambaModel",
        SPECIAL | {"hidden_size": 12, "state_size": 4, "num_hidden_layers": 1, "time_step_rank": 2},
        prompts,
        grads=True,
    ),
    transformers_case(
        "Mamba2Model",
        SPECIAL
        | {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "num_heads": 4}
        | {"head_dim": 8, "n_groups": 1, "chunk_size": 4},
        prompts,
    ),
]

ENCODERS = [
    transformers_case("BertModel", ENCODER, pairs, grads=True),
    transformers_case("RobertaModel", ENCODER, sentences),
    transformers_case(
        "DebertaModel",
        ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        sentences,
    ),
    transformers_case(
        "DebertaV2Model",
        ENCODER
        | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4}
        | {"share_att_key": True, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3},
        sentences,
        grads=True,
    ),
    transformers_case(
        "AlbertModel", ENCODER | {"embedding_size": 8, "num_hidden_layers": 2}, pairs
    ),
    transformers_case(
        "XLNetModel",
        SPECIAL | {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 20},
        sentences,
    ),
    transformers_case(
        "LongformerModel",
        ENCODER | {"attention_window": 4},
        lambda: sentences() | {"global_attention_mask": keep(1, 2, size=7)},
    ),
    transformers_case(
        "BigBirdModel",
        ENCODER | {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1},
        lambda: sentences(19),
    ),
    transformers_case("ReformerModel", _REFORMER, lambda: sentences(13)),
    transformers_case(
        "ReformerModel",
        _REFORMER,
        lambda: sentences(13) | {"use_cache": False},
        note="no_cache",
    ),
    transformers_case(
        "T5Model",
        SPECIAL
        | {"d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2}
        | {"feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 8}
        | {"decoder_start_token_id": 0},
        translations,
        grads=True,
    ),
    transformers_case(
        "BartModel",
        SPECIAL
        | {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 20}
        | {"decoder_ffn_dim": 20, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        | {"max_position_embeddings": 12, "decoder_start_token_id": 2},
        translations,
    ),
]

TEXTS = [*DECODERS, *ENCODERS]
