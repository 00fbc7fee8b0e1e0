"""The flags of stage 1, with upstream's names where they mean the same, and its defaults."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tpuport.foundation.errors import UsageError

# Upstream's flags without effect here: the accepted values (None for any), and the reason.
_WITHOUT_EFFECT: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "deepspeed": (None, "weights and state are sharded by --fsdp_devices"),
    "do_train": (("true",), "finetune does nothing else"),
    "evaluation_strategy": (("no",), "there is no evaluation"),
    "group_by_length": (None, "rows have static lengths: --use_packed_ds, --row_lengths"),
    "overwrite_output_dir": (
        None,
        "a run in --output_dir is resumed; give another folder for a new run",
    ),
    "report_to": (None, "metrics are in log.jsonl"),
    "save_strategy": (("steps",), "checkpoints are saved every --save_steps"),
    "use_fast_tokenizer": (None, "the tokenizer is that of transformers' AutoTokenizer"),
}


def _help(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class FinetuneOptions:
    """The flags of `python -m recipes.recogdrive finetune`, described by their help texts."""

    model_name_or_path: str = field(
        metadata={"help": "Folder of an InternVL in transformers' or OpenGVLab's format."}
    )
    meta_path: str = field(metadata={"help": "Meta file of the conversations."})
    output_dir: str = field(metadata={"help": "Folder for checkpoints, logs and the final model."})
    upstream: str | None = _help(None, "Checkout of recogdrive, to train its own model.")
    conv_style: str = _help("internvl2_5", "Conversation template; only internvl2_5.")
    # Images.
    force_image_size: int = _help(448, "Side of a tile in pixels.")
    down_sample_ratio: float = _help(0.5, "Factor by which a tile's side in patches shrinks.")
    dynamic_image_size: bool = _help(True, "Cut an image into several tiles, by its shape.")
    use_thumbnail: bool = _help(True, "Add the image, resized, as one more tile.")
    min_dynamic_patch: int = _help(1, "Minimum number of tiles of an image.")
    max_dynamic_patch: int = _help(16, "Maximum tiles of an image, without the thumbnail.")
    normalize_type: Literal["imagenet", "clip", "siglip"] = _help(
        "imagenet", "Pixel normalisation."
    )
    pad2square: bool = _help(False, "Pad tiles to a square instead of stretching them.")
    ps_version: str = _help("v2", "Pixel shuffle version; only v2.")
    vision_select_layer: int = _help(-1, "Layer of the vision tower; only -1.")
    # Rows.
    max_seq_length: int = _help(12288, "Maximum tokens of a sample; longer ones are cut off.")
    use_packed_ds: bool = _help(True, "Pack several samples in a row. (Upstream: False.)")
    max_packed_tokens: int | None = _help(None, "Tokens per packed row [default: max_seq_length].")
    num_images_expected: int = _help(64, "Maximum number of tiles of a row.")
    row_lengths: list[int] = field(
        default_factory=list,
        metadata={"help": "Further row lengths, each one more program: 2048 4096."},
    )
    loss_reduction: Literal["token", "sample", "square"] = _help(
        "token", "What is weighted equally; upstream's unpacked batches of one weight samples."
    )
    on_broken: Literal["raise", "skip"] = _help(
        "raise", "What to do about missing or cut-off images."
    )
    # Trained parts.
    freeze_llm: bool = _help(False, "Freeze the language model.")
    freeze_mlp: bool = _help(False, "Freeze the projection.")
    freeze_backbone: bool = _help(False, "Freeze the vision tower.")
    drop_path_rate: float = _help(0.0, "Drop path of the vision tower; only with --upstream.")
    # Optimisation.
    learning_rate: float = _help(4e-5, "Highest learning rate.")
    weight_decay: float = _help(0.05, "Weight decay, not on biases and norms.")
    adam_beta1: float = _help(0.9, "AdamW's first beta.")
    adam_beta2: float = _help(0.999, "AdamW's second beta.")
    adam_epsilon: float = _help(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = _help(1.0, "Largest global gradient norm; 0 for no limit.")
    warmup_ratio: float = _help(0.1, "Fraction of the steps with learning rate warmup.")
    lr_scheduler_type: str = _help("cosine", "Learning rate schedule, by transformers' name.")
    num_train_epochs: float = _help(3.0, "Number of epochs.")
    max_steps: int = _help(-1, "Stop after so many steps of the schedule; -1 for all.")
    per_device_train_batch_size: int = _help(1, "Rows per device and batch.")
    gradient_accumulation_steps: int = _help(1, "Batches per update.")
    seed: int = _help(42, "Random seed of data order and augmentation.")
    # Machine.
    bf16: bool = _help(True, "Compute in bfloat16 with float32 master weights.")
    grad_checkpoint: bool = _help(True, "Recompute blocks in the backward pass.")
    fsdp_devices: int = _help(-1, "Devices that weights are sharded over; -1 for all.")
    dataloader_num_workers: int = _help(0, "Processes that read images; 0 for a thread.")
    logging_steps: int = _help(1, "Steps between lines of log.jsonl.")
    save_steps: int = _help(200, "Steps between checkpoints.")
    save_total_limit: int = _help(3, "Number of checkpoints to keep.")


def check(options: FinetuneOptions) -> None:
    """Raise `UsageError` for values that upstream supports and this recipe does not."""
    only: dict[str, Any] = {
        "conv_style": "internvl2_5",
        "ps_version": "v2",
        "vision_select_layer": -1,
    }
    if options.upstream is None:
        only["drop_path_rate"] = 0.0
    for name, value in only.items():
        given = getattr(options, name)
        if given != value:
            more = " without --upstream" if name == "drop_path_rate" else ""
            raise UsageError(f"--{name} {given}: only {value} is there{more}")


def parse(
    arguments: Sequence[str], *, note: Callable[[str], None] | None = None
) -> FinetuneOptions:
    """Parse the flags of a command line.

    Args:
        arguments: Arguments without the command.
        note: Called with a line for each of upstream's flags that has no effect here.

    Raises:
        UsageError: There is no such flag.
    """
    from transformers import HfArgumentParser

    kind: Any = FinetuneOptions
    # Without this, argparse would take an unknown flag for an abbreviation of another.
    parser = HfArgumentParser(
        kind,
        prog="recipes.recogdrive finetune",
        description="Fine-tune the chat model on conversations about driving (stage 1).",
        allow_abbrev=False,
    )
    options, left = parser.parse_args_into_dataclasses(
        list(arguments), look_for_args_file=False, return_remaining_strings=True
    )
    for line in _without_effect(left):
        if note is not None:
            note(line)
    return options


def _without_effect(left: list[str]) -> list[str]:
    """Return notes about flags without effect, and raise `UsageError` for unknown ones."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for name in _WITHOUT_EFFECT:
        parser.add_argument(f"--{name}", nargs="?", const="true")
    known, unknown = parser.parse_known_args(left)
    if unknown:
        raise UsageError(
            f"finetune: unknown {' '.join(unknown)}. What to do: leave it out; --help lists what"
            " there is"
        )
    lines = []
    for name, given in vars(known).items():
        taken, why = _WITHOUT_EFFECT[name]
        if given is None:
            continue
        if taken is not None and given.lower() not in taken:
            raise UsageError(f"--{name} {given}: only {' or '.join(taken)} is there: {why}")
        lines.append(f"--{name} {given} has no effect: {why}")
    return lines
