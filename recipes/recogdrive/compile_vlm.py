"""Compilation of the chat model's programs at full size from shapes alone, without a TPU."""

from typing import Any

import jax
import torch

import tpuport
from recipes.recogdrive.cache import MAX_LENGTH, last_hidden_states
from recipes.recogdrive.finetune import port_model, step_of, tiling_of
from recipes.recogdrive.finetune_options import FinetuneOptions
from recipes.recogdrive.packing import Bucket, make_buckets
from recipes.recogdrive.vlm import ChatModel, make_config, make_vlm
from tpuport.aot.report import CompileReport
from tpuport.sharding import make_mesh

# The chat model that goes with a planner, by the planner's size.
BESIDE = {"tiny": "tiny", "small": "internvl3-2b", "large": "internvl3-8b"}
SCENES = 8  # per chip and batch, when hidden states are cached
# Only the learning rate schedule depends on it.
STEPS = 1000

Shapes = dict[str, jax.ShapeDtypeStruct]


def row_shapes(rows: int, bucket: Bucket, side: int) -> Shapes:
    """Return the shapes of a batch of rows of samples, as `packing.fill_batch` makes it."""
    tokens, tiles = (rows, bucket.length), (rows, bucket.tiles)
    numbers = dict.fromkeys(("input_ids", "labels", "segments", "position_ids"), (tokens, "int32"))
    shapes: dict[str, Any] = {
        **numbers,
        "loss_weight": (tokens, "float32"),
        "pixel_values": ((*tiles, 3, side, side), "float32"),
        "image_flags": (tiles, "int32"),
    }
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def _model(size: str) -> tuple[ChatModel, Any]:
    config = make_config(BESIDE[size])
    with torch.device("meta"):
        return ChatModel(make_vlm(config), config.image_token_id), config


def compile_finetune(
    size: str = "small", topology: str = "v6e-4", batch: int | None = None, **how: Any
) -> CompileReport:
    """Compile a step of stage 1 with default flags: rows of 12288 tokens, weights sharded.

    Args:
        size: Size of the planner that the model goes with.
        topology: TPU slice.
        batch: Rows over all chips; by default one per chip.
        **how: Further arguments of `tpuport.compile_for`.
    """
    options = FinetuneOptions("", "", "")
    model, config = _model(size)
    bucket = make_buckets(
        [options.max_seq_length], config.image_seq_length, options.num_images_expected
    )[0]
    step = step_of(port_model(model, options), model, options, STEPS)
    rows = row_shapes(batch or _chips(topology), bucket, options.force_image_size)
    return tpuport.compile_for(
        step, topology, inputs=(rows,), rules="fsdp", mesh={"fsdp": -1}, **how
    )


def compile_cache(
    size: str = "small", topology: str = "v6e-4", batch: int | None = None, **how: Any
) -> CompileReport:
    """Compile the hidden states of a batch of scenes in bfloat16, scenes sharded over the chips.

    Args:
        size: Size of the planner that the model goes with.
        topology: TPU slice.
        batch: Scenes over all chips; by default eight per chip.
        **how: Further arguments of `tpuport.compile_for`.
    """
    model, config = _model(size)
    tiles = tiling_of(FinetuneOptions("", "", "", max_dynamic_patch=12)).bound
    ported = tpuport.convert(model.eval().requires_grad_(False), methods=(last_hidden_states,))
    tpuport.cast(ported, "bf16")
    side = config.vision_config.image_size[0]
    shapes = row_shapes(batch or SCENES * _chips(topology), Bucket(MAX_LENGTH, tiles), side)
    names = ("input_ids", "pixel_values", "image_flags", "segments", "position_ids")
    return tpuport.compile_for(
        ported,
        topology,
        inputs={name: shapes[name] for name in names},
        method=last_hidden_states.__name__,
        rules="ddp",
        mesh={"data": -1},
        **how,
    )


def _chips(topology: str) -> int:
    return make_mesh({"data": -1}, topology).size
