"""The flags of stage 1: upstream's names where they mean the same, and its script's defaults."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tpuport.errors import UsageError

# Upstream's flags that change nothing here: the values that are taken, None for any, and why.
_WITHOUT_EFFECT: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "deepspeed": (None, "weights and state are spread by --fsdp_devices"),
    "do_train": (("true",), "finetune does nothing else"),
    "evaluation_strategy": (("no",), "there is no evaluation"),
    "group_by_length": (None, "rows have static lengths: --use_packed_ds, --row_lengths"),
    "overwrite_output_dir": (
        None,
        "a run that is in --output_dir goes on; give another folder to begin anew",
    ),
    "report_to": (None, "numbers are in log.jsonl"),
    "save_strategy": (("steps",), "states are saved each --save_steps"),
    "use_fast_tokenizer": (None, "the tokenizer is the one of transformers' AutoTokenizer"),
}


def _help(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class FinetuneOptions:
    """The flags of `python -m recipes.recogdrive finetune`; their help says what they mean."""

    model_name_or_path: str = field(metadata={"help": "Folder of an InternVL of transformers."})
    meta_path: str = field(metadata={"help": "Meta file of the conversations."})
    output_dir: str = field(metadata={"help": "Where states, logs and the final model go."})
    upstream: str | None = _help(None, "A checkout of recogdrive whose own model is trained.")
    conv_style: str = _help("internvl2_5", "Template; internvl2_5 is the one there is.")
    # Images.
    force_image_size: int = _help(448, "Side of a tile in pixels.")
    down_sample_ratio: float = _help(0.5, "By which a tile's patches become fewer.")
    dynamic_image_size: bool = _help(True, "Several tiles an image, by its shape.")
    use_thumbnail: bool = _help(True, "The whole image as one more tile.")
    min_dynamic_patch: int = _help(1, "Fewest tiles of an image.")
    max_dynamic_patch: int = _help(16, "Most tiles of an image, without the thumbnail.")
    normalize_type: Literal["imagenet", "clip", "siglip"] = _help("imagenet", "Mean and deviation.")
    pad2square: bool = _help(False, "Fill tiles up to a square instead of stretching them.")
    ps_version: str = _help("v2", "Pixel shuffle; v2 is the one there is.")
    vision_select_layer: int = _help(-1, "Layer of the vision tower; -1 is the one there is.")
    # Rows.
    max_seq_length: int = _help(12288, "Tokens of a sample; what is longer is cut off.")
    use_packed_ds: bool = _help(True, "Several samples in a row. (Upstream: False.)")
    max_packed_tokens: int | None = _help(None, "Tokens of a packed row; max_seq_length if None.")
    num_images_expected: int = _help(64, "Most tiles of a row.")
    row_lengths: list[int] = field(
        default_factory=list,
        metadata={"help": "Further, shorter rows, each one more program: 2048 4096."},
    )
    loss_reduction: Literal["token", "sample", "square"] = _help(
        "token", "What counts alike; upstream's unpacked batches of one count samples."
    )
    on_broken: Literal["raise", "skip"] = _help("raise", "Images that are not there or cut off.")
    # What is trained.
    freeze_llm: bool = _help(False, "Leave the language model as it is.")
    freeze_mlp: bool = _help(False, "Leave the projection as it is.")
    freeze_backbone: bool = _help(False, "Leave the vision tower as it is.")
    drop_path_rate: float = _help(0.0, "Of the vision tower; only with --upstream.")
    # Optimisation.
    learning_rate: float = _help(4e-5, "Highest learning rate.")
    weight_decay: float = _help(0.05, "Of all but biases and norms.")
    adam_beta1: float = _help(0.9, "AdamW's first.")
    adam_beta2: float = _help(0.999, "AdamW's second.")
    adam_epsilon: float = _help(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = _help(1.0, "Largest norm of all gradients; 0 for any.")
    warmup_ratio: float = _help(0.1, "Part of the steps in which the learning rate rises.")
    lr_scheduler_type: str = _help("cosine", "By transformers' name.")
    num_train_epochs: float = _help(3.0, "How often each sample is seen.")
    max_steps: int = _help(-1, "Stop after so many steps of the schedule; -1 for none.")
    per_device_train_batch_size: int = _help(1, "Rows of a device at a time.")
    gradient_accumulation_steps: int = _help(1, "Batches of one update.")
    seed: int = _help(42, "Of order and augmentation.")
    # Machine.
    bf16: bool = _help(True, "Compute in bfloat16 with float32 master weights.")
    grad_checkpoint: bool = _help(True, "Compute blocks again for the gradient.")
    fsdp_devices: int = _help(-1, "Devices that weights are spread over; -1 for all.")
    dataloader_num_workers: int = _help(0, "Processes that read images; 0 for a thread.")
    logging_steps: int = _help(1, "Steps between lines of log.jsonl.")
    save_steps: int = _help(200, "Steps between states on disk.")
    save_total_limit: int = _help(3, "How many of them are kept.")


def check(options: FinetuneOptions) -> None:
    """Raise `UsageError` for what there is in upstream and not here."""
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
    """The flags of a command line.

    Args:
        arguments: without the command.
        note: called with a line for each of upstream's flags that has no effect here.

    Raises:
        UsageError: there is no such flag.
    """
    from transformers import HfArgumentParser

    kind: Any = FinetuneOptions
    # Abbreviations would take a flag that is not there for another one.
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
    """What is to be said of flags that are not ours; raises `UsageError` for unknown ones."""
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
