"""Ready tables for families of models, with fsdp and tensor together.

On a mesh where one of the two axes has size 1, only the other has an effect. Each table works at
any depth below a wrapper (`**`). Rules that one member of a family has no use for are not reported.
A Linear's weight is (out, in): a column is sharded along its out dim, a row along its in dim.
"""

from jax.sharding import PartitionSpec as P

from tpuport.sharding.rule_table import ShardingRules

_BATCH = ("data", "fsdp")
_COLUMN, _ROW = P("tensor", "fsdp"), P("fsdp", "tensor")
_BIAS, _WHOLE = P("tensor"), P()


def _table(
    name: str,
    *,
    columns: tuple[str, ...],
    rows: tuple[str, ...],
    spread: tuple[str, ...] = (),
    more: dict[str, P] | None = None,
    blocks: tuple[str, ...] = (),
) -> ShardingRules:
    """Build a table from patterns: column and row modules, and Linears only stored sharded."""
    rules = dict(more or {})
    for pattern in columns:
        rules |= {f"{pattern}.weight": _COLUMN, f"{pattern}.bias": _BIAS}
    for pattern in rows:
        rules |= {f"{pattern}.weight": _ROW, f"{pattern}.bias": _WHOLE}
    for pattern in spread:
        rules |= {f"{pattern}.weight": P("fsdp"), f"{pattern}.bias": _WHOLE}
    made = ShardingRules(
        rules,
        name=name,
        inputs={"**": P(_BATCH)},
        activations=dict.fromkeys(blocks, P(_BATCH)),
    )
    return made.optional()


_DECODER_COLUMNS = (
    "**.layers.*.self_attn.q_proj", "**.layers.*.self_attn.k_proj", "**.layers.*.self_attn.v_proj",
    "**.layers.*.mlp.gate_proj", "**.layers.*.mlp.up_proj",
)  # fmt: skip
_DECODER_ROWS = ("**.layers.*.self_attn.o_proj", "**.layers.*.mlp.down_proj")
_DECODER_MORE = {"**.embed_tokens.weight": _COLUMN, "**.lm_head.weight": _COLUMN}

# transformers' Llama, and models that share its names: Mistral, Qwen 3.
LLAMA = _table(
    "llama",
    columns=_DECODER_COLUMNS,
    rows=_DECODER_ROWS,
    more=_DECODER_MORE,
    blocks=("**.layers.*",),
)
# Qwen 2 and 2.5: the same names, with biases on q, k and v.
QWEN2 = _table(
    "qwen2",
    columns=_DECODER_COLUMNS,
    rows=_DECODER_ROWS,
    more=_DECODER_MORE,
    blocks=("**.layers.*",),
)
# InternVL 3: transformers' names and OpenGVLab's own (vision_model, mlp1), around a Qwen 2.
INTERNVL = _table(
    "internvl",
    columns=(
        *_DECODER_COLUMNS,
        "**.vision_tower.encoder.layer.*.attention.q_proj",
        "**.vision_tower.encoder.layer.*.attention.k_proj",
        "**.vision_tower.encoder.layer.*.attention.v_proj",
        "**.vision_tower.encoder.layer.*.mlp.fc1",
        "**.vision_model.encoder.layers.*.attn.qkv",
        "**.vision_model.encoder.layers.*.mlp.fc1",
        "**.multi_modal_projector.linear_1",
        "**.mlp1.1",
    ),
    rows=(
        *_DECODER_ROWS,
        "**.vision_tower.encoder.layer.*.attention.projection_layer",
        "**.vision_tower.encoder.layer.*.mlp.fc2",
        "**.vision_model.encoder.layers.*.attn.proj",
        "**.vision_model.encoder.layers.*.mlp.fc2",
        "**.multi_modal_projector.linear_2",
        "**.mlp1.3",
    ),
    more=_DECODER_MORE,
    blocks=("**.language_model.**.layers.*", "**.encoder.layer.*", "**.encoder.layers.*"),
)
# HunyuanVideo 1.5, diffusers' HunyuanVideo15Transformer3DModel.
HUNYUAN_VIDEO15 = _table(
    "hunyuan_video15",
    columns=(
        "**.attn.to_q", "**.attn.to_k", "**.attn.to_v",
        "**.attn.add_q_proj", "**.attn.add_k_proj", "**.attn.add_v_proj",
        "**.ff.net.0.proj", "**.ff_context.net.0.proj",
        "**.norm1.linear", "**.norm1_context.linear",
        "**.text_embedder.linear_1", "**.timestep_embedder.linear_1",
    ),
    rows=(
        "**.attn.to_out.0", "**.attn.to_add_out", "**.ff.net.2", "**.ff_context.net.2",
        "**.text_embedder.linear_2", "**.timestep_embedder.linear_2",
    ),
    spread=("context_embedder.proj_in", "**.norm_out.linear", "image_embedder.*",
            "context_embedder_2.*"),
    blocks=("transformer_blocks.*",),
)  # fmt: skip
# HunyuanVideo 1.5 as Tencent's own code names it.
HYVIDEO15 = _table(
    "hyvideo15",
    columns=(
        "**.img_attn_q", "**.img_attn_k", "**.img_attn_v",
        "**.txt_attn_q", "**.txt_attn_k", "**.txt_attn_v",
        "**.linear1_q", "**.linear1_k", "**.linear1_v", "**.linear1_mlp",
        "**.img_mlp.fc1", "**.txt_mlp.fc1", "**.individual_token_refiner.**.mlp.fc1",
        "**.self_attn_qkv", "**.img_mod.linear", "**.txt_mod.linear", "**.modulation.linear",
        "byt5_in.fc1", "time_in.mlp.0",
    ),
    rows=(
        "**.img_attn_proj", "**.txt_attn_proj", "**.img_mlp.fc2", "**.txt_mlp.fc2",
        "**.individual_token_refiner.**.mlp.fc2", "**.self_attn_proj", "**.linear2.fc",
        "byt5_in.fc2", "time_in.mlp.2",
    ),
    spread=("byt5_in.fc3", "txt_in.input_embedder", "vision_in.proj.*"),
    blocks=("double_blocks.*", "single_blocks.*"),
)  # fmt: skip
# Wan 2.1 and 2.2, diffusers' WanTransformer3DModel.
WAN = _table(
    "wan",
    columns=(
        "**.attn1.to_q", "**.attn1.to_k", "**.attn1.to_v",
        "**.attn2.to_q", "**.attn2.to_k", "**.attn2.to_v",
        "**.attn2.add_k_proj", "**.attn2.add_v_proj", "**.ffn.net.0.proj",
        "condition_embedder.text_embedder.linear_1", "condition_embedder.time_embedder.linear_1",
        "condition_embedder.time_proj",
    ),
    rows=(
        "**.attn1.to_out.0", "**.attn2.to_out.0", "**.ffn.net.2",
        "condition_embedder.text_embedder.linear_2", "condition_embedder.time_embedder.linear_2",
    ),
    blocks=("blocks.*",),
)  # fmt: skip
# Flux.1, diffusers' FluxTransformer2DModel. The single blocks' proj_out takes attention and MLP
# concatenated, so its input is exchanged; its weight is stored sharded.
FLUX = _table(
    "flux",
    columns=(
        "**.attn.to_q", "**.attn.to_k", "**.attn.to_v",
        "**.attn.add_q_proj", "**.attn.add_k_proj", "**.attn.add_v_proj",
        "**.ff.net.0.proj", "**.ff_context.net.0.proj", "**.proj_mlp",
        "**.norm1.linear", "**.norm1_context.linear", "**.norm.linear",
        "time_text_embed.*.linear_1",
    ),
    rows=(
        "**.attn.to_out.0", "**.attn.to_add_out", "**.ff.net.2", "**.ff_context.net.2",
        "**.single_transformer_blocks.*.proj_out", "time_text_embed.*.linear_2",
    ),
    spread=("norm_out.linear", "context_embedder"),
    blocks=("transformer_blocks.*", "single_transformer_blocks.*"),
)  # fmt: skip
# ReCogDrive's diffusion planner (navsim.agents.recogdrive).
RECOGDRIVE = _table(
    "recogdrive",
    columns=(
        "**.transformer_blocks.*.**.to_q", "**.transformer_blocks.*.**.to_k",
        "**.transformer_blocks.*.**.to_v", "**.transformer_blocks.*.**.w12",
        "**.transformer_blocks.*.adaLN_modulation.1", "**.timestep_embedder.linear_1",
    ),
    rows=(
        "**.transformer_blocks.*.**.to_out.0", "**.transformer_blocks.*.**.w3",
        "**.timestep_embedder.linear_2",
    ),
    spread=("**.feature_encoder", "**.fusion_projector"),
    blocks=("**.transformer_blocks.*",),
)  # fmt: skip

# Every ready table by its name.
TABLES = {
    table.name: table
    for table in (LLAMA, QWEN2, INTERNVL, HUNYUAN_VIDEO15, HYVIDEO15, WAN, FLUX, RECOGDRIVE)
}
