"""Full-size models without weights, with the settings with which a step of each is compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TILES, TOKENS_A_TILE = 13, 256


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        name: Name of the model and of what is compiled, for the table.
        setting: Batch size and lengths, for the table.
        topology: TPU slice.
        make: Returns the ported model and further arguments of `tpuport.compile_for`.
        mesh: Sizes by mesh axis.
        sequence_parallel: Sequence-parallel strategy (`tpuport.attention_options`).
    """

    name: str
    setting: str
    topology: str
    make: Callable[[], tuple[Any, dict[str, Any]]]
    mesh: dict[str, int]
    sequence_parallel: Any = "all_gather"


def _bf16_and_recomputed(patterns: dict[str, str]) -> Callable[[Any], None]:
    """Return a policy: weights in bfloat16, blocks recomputed in the backward pass."""

    def policy(ported: Any) -> None:
        import tpuport

        tpuport.cast(ported, "bf16")
        tpuport.remat(ported, patterns)

    return policy


def _ids(batch: int, length: int) -> Any:
    import jax

    return jax.ShapeDtypeStruct((batch, length), "int32")


def llama(batch: int) -> tuple[Any, dict[str, Any]]:
    """Return a training step of Llama 3.1 8B on sequences of 8192 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import tpuport

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = _ids(batch, 8192)
    return tpuport.convert(model), {
        "inputs": {"input_ids": ids, "labels": ids, "use_cache": False},
        "train": True,
        "policy": _bf16_and_recomputed({"model.layers.*": "full"}),
    }


def internvl(batch: int) -> tuple[Any, dict[str, Any]]:
    """Return a training step of a model like InternVL3-8B, on 4096 tokens with 13 tiles each."""
    import jax
    import torch
    from transformers import InternVLConfig, InternVLForConditionalGeneration, Qwen2Config
    from transformers.models.internvl.configuration_internvl import InternVLVisionConfig

    import tpuport

    vision = InternVLVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=[448, 448],
        patch_size=[14, 14],
        attention_bias=True,
    )
    text = Qwen2Config(
        vocab_size=151674,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )
    config = InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=151667,
        image_seq_length=TOKENS_A_TILE,
        downsample_ratio=0.5,
    )
    with torch.device("meta"):
        model = InternVLForConditionalGeneration(config)
    ids = _ids(batch, 4096)
    pixels = jax.ShapeDtypeStruct((batch * TILES, 3, 448, 448), "bfloat16")
    blocks = ("model.vision_tower.encoder.layer.*", "model.language_model.layers.*")
    return tpuport.convert(model), {
        "inputs": {"input_ids": ids, "labels": ids, "pixel_values": pixels, "use_cache": False},
        "train": True,
        "policy": _bf16_and_recomputed(dict.fromkeys(blocks, "full")),
    }


def hunyuan_video(batch: int) -> tuple[Any, dict[str, Any]]:
    """Return the forward of HunyuanVideo 1.5's transformer, 121 frames of 720p: 112,856 tokens."""
    import diffusers
    import jax
    import torch
    from jax.sharding import PartitionSpec as P

    import tpuport
    from tpuport.sharding import ShardingRules, SpecRule, sequence_activations

    with torch.device("meta"):
        model: Any = getattr(diffusers, "HunyuanVideo15Transformer3DModel")(num_layers=54)  # noqa: B009 - lazy
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    shape = jax.ShapeDtypeStruct
    modulation = [
        SpecRule(f"**.{norm}.linear.{leaf}", P("sequence"), "modulation")
        for norm in ("norm1", "norm1_context")
        for leaf in ("weight", "bias")
    ]
    rules = ShardingRules(
        [*modulation, SpecRule("**", P(), "replicated")],
        name="tokens spread",
        activations=sequence_activations(model),
    )
    inputs = {
        "hidden_states": shape((batch, 65, 31, 45, 80), "bfloat16"),
        "timestep": shape((batch,), "bfloat16"),
        "encoder_hidden_states": shape((batch, 1000, 3584), "bfloat16"),
        "encoder_attention_mask": shape((batch, 1000), "int32"),
        "encoder_hidden_states_2": shape((batch, 256, 1472), "bfloat16"),
        "encoder_attention_mask_2": shape((batch, 256), "int32"),
        "image_embeds": shape((batch, 0, 1152), "bfloat16"),
        "return_dict": False,
    }
    return tpuport.convert(model), {"inputs": inputs, "rules": rules}
