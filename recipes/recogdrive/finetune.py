"""Stage 1: fine-tuning of the VLM on conversations about driving."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import tpuport
from recipes.hosts import check_covers, check_same, gather
from recipes.recogdrive.finetune_options import FinetuneOptions, check, parse
from recipes.recogdrive.loading import load_chat_model, save_chat_model, tile_of
from recipes.recogdrive.packing import make_buckets
from recipes.recogdrive.samples import ChatData, PlannedChats, PlannedRows
from recipes.recogdrive.tiles import Tiling
from recipes.recogdrive.upstream_vlm import (
    UpstreamChatModel,
    back_to_transformers,
    upstream_chat_model,
)
from recipes.recogdrive.vlm import ChatModel, freeze
from recipes.records import check_run
from tpuport.model.ported_model import PortedModel
from tpuport.sharding import fsdp, make_mesh
from tpuport.training import (
    Batches,
    Checkpoints,
    JsonLines,
    TrainStep,
    fit,
    from_torch,
    initialize,
    make_train_step,
)

RECORD = "run.json"  # in the run's folder: identifies its batches


def tiling_of(options: FinetuneOptions) -> Tiling:
    """Return the tiling of images that the flags ask for."""
    return Tiling(
        options.force_image_size,
        options.min_dynamic_patch,
        options.max_dynamic_patch,
        options.dynamic_image_size,
        options.use_thumbnail,
        options.normalize_type,
        options.pad2square,
    )


def plan_batches(
    options: FinetuneOptions, tokenizer: Any, tokens_per_tile: int, num_rows: int
) -> PlannedChats:
    """Plan all batches of the run.

    Args:
        options: The flags.
        tokenizer: A tokenizer of transformers.
        tokens_per_tile: Number of tokens per tile.
        num_rows: Rows of a batch, over all devices and accumulated parts.

    Raises:
        UsageError: The data has another format, or does not fit.
    """
    data = ChatData(
        options.meta_path, tokenizer, tiling_of(options), tokens_per_tile, options.max_seq_length
    )
    usable = data.usable(Path(options.output_dir) / "sizes", options.on_broken)
    longest = options.max_seq_length
    if options.use_packed_ds and options.max_packed_tokens is not None:
        longest = options.max_packed_tokens
    return PlannedChats(
        data,
        usable,
        make_buckets([*options.row_lengths, longest], tokens_per_tile, options.num_images_expected),
        num_rows=num_rows,
        epochs=options.num_train_epochs,
        pack=options.use_packed_ds,
        reduction=options.loss_reduction,
        seed=options.seed,
    )


def make_optimizer(model: torch.nn.Module, options: FinetuneOptions) -> torch.optim.AdamW:
    """Return torch's AdamW over the trained parameters, without decay for biases and norms.

    Norms are recognised by their class, since a name such as `mlp1.0` in a Sequential says nothing.
    """
    norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torch.nn.LayerNorm) or type(module).__name__.endswith("Norm")
        for parameter in module.parameters(recurse=False)
    }
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain = name.endswith("bias") or id(parameter) in norms
            (others if plain else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_epsilon,
    )


def make_schedule(
    optimizer: torch.optim.Optimizer, options: FinetuneOptions, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return transformers' learning rate schedule of the given name, with its warmup."""
    from transformers import get_scheduler

    warmup = -int(-steps * options.warmup_ratio // 1)
    return get_scheduler(options.lr_scheduler_type, optimizer, warmup, steps)


def chat_loss(model: ChatModel, batch: dict[str, torch.Tensor]) -> Any:
    """Return the loss of a batch, and its metrics."""
    return model(**batch)


def make_step(model: ChatModel, options: FinetuneOptions, steps: int) -> TrainStep:
    """Return the training step of a model, as the flags say.

    Args:
        model: Model on the CPU, in float32. Parts are frozen here if flags say so.
        options: The flags.
        steps: Steps of the complete run, for the schedule.
    """
    ported = port_model(model, options)
    if num_devices(options) > 1:
        mesh = make_mesh({"fsdp": num_devices(options)})
        tpuport.shard(ported, mesh, fsdp(model, mesh))
    tpuport.stack_blocks(ported)
    return step_of(ported, model, options, steps)


def port_model(model: ChatModel, options: FinetuneOptions) -> PortedModel:
    """Port a model for training, as the flags say, and freeze what they freeze."""
    flags = ("llm", "mlp", "backbone")
    freeze(model, tuple(name for name in flags if getattr(options, f"freeze_{name}")))
    ported = tpuport.convert(model.train(), verify=False)
    if options.bf16:
        tpuport.cast(ported, "bf16_master")
    if options.grad_checkpoint:
        tpuport.remat(ported, "full")
    return ported


def step_of(
    ported: PortedModel, model: ChatModel, options: FinetuneOptions, steps: int
) -> TrainStep:
    """Return the training step of a port, on its mesh if it has one."""
    optimizer = make_optimizer(model, options)
    schedule = make_schedule(optimizer, options, steps)
    return make_train_step(
        ported,
        chat_loss,
        from_torch(ported, optimizer, schedule, steps=steps),
        accumulate=options.gradient_accumulation_steps,
        clip_norm=options.max_grad_norm or None,
    )


def num_devices(options: FinetuneOptions) -> int:
    """Return the number of devices over which weights and batches are sharded."""
    import jax

    return jax.device_count() if options.fsdp_devices == -1 else options.fsdp_devices


def run(options: FinetuneOptions, say: Callable[[str], None] | None = None) -> ChatModel:
    """Train, or resume after a kill, and write the model; see `main`."""
    check(options)
    hosts = initialize()
    say = (say or _say) if hosts.is_first else _say_nothing
    check_covers(
        f"--fsdp_devices {options.fsdp_devices}",
        num_devices(options),
        "leave it out, or give -1, for the devices of all",
    )
    model, tokenizer = load_chat_model(
        options.model_name_or_path,
        force_image_size=options.force_image_size,
        down_sample_ratio=options.down_sample_ratio,
    )
    rows = options.per_device_train_batch_size * options.gradient_accumulation_steps
    planned = plan_batches(options, tokenizer, tile_of(model)[1], rows * num_devices(options))
    steps = len(planned) if options.max_steps < 0 else options.max_steps
    say(
        f"{len(planned.usable.indices)} samples, {steps} steps of {rows * num_devices(options)}"
        f" rows, {planned.filled:.0%} of their tokens filled"
    )
    for why, count in planned.usable.left_out.items():
        say(f"{count} samples left out: {why}")
    folder = Path(options.output_dir)
    with contextlib.ExitStack() as stack:
        used = model
        if options.upstream is not None:
            make = upstream_chat_model(options.upstream, drop_path_rate=options.drop_path_rate)
            used = stack.enter_context(make)(model)
        trained = train(used, options, planned, steps)
        if isinstance(trained, UpstreamChatModel):
            trained = back_to_transformers(trained, model)
    if hosts.is_first:
        dtype = torch.bfloat16 if options.bf16 else torch.float32
        save_chat_model(trained, tokenizer, folder / "model", dtype)
        say(f"the model is in {folder / 'model'}")
    return trained


def train(
    model: ChatModel, options: FinetuneOptions, planned: PlannedChats, steps: int
) -> ChatModel:
    """Train and return the model after all steps, those before a kill included.

    Raises:
        UsageError: The run was begun with other batches.
    """
    folder = Path(options.output_dir)
    check_same({"flags": options, **planned.identity()})
    check_run(
        folder / RECORD,
        planned.identity(),
        "give the data and flags that the run was begun with, or another --output_dir",
    )
    step = make_step(model, options, steps)
    workers = options.dataloader_num_workers
    rows = PlannedRows(planned)
    batches = Batches(rows, batch_size=planned.num_rows, shuffle=False, workers=workers)
    with Checkpoints(folder / "states", keep=options.save_total_limit) as saved:
        state = fit(
            step,
            batches,
            steps=steps,
            checkpoints=saved,
            save_every=options.save_steps,
            log_every=options.logging_steps,
            sinks=[JsonLines(folder / "log.jsonl")],
        )
    trained: Any = gather(step.load_state(state)).to_torch()
    return trained


def main(arguments: Sequence[str] | None = None) -> None:
    """Fine-tune, or resume from the last checkpoint after a kill."""
    run(parse(sys.argv[1:] if arguments is None else arguments, note=_say))


def _say_nothing(text: str) -> None:
    del text


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
