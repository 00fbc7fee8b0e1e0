"""Policies from and to openpi's model.safetensors, with the sizes in a config.json beside it."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

import tpuport
from recipes.openpi.config import Config, read_config
from recipes.openpi.model import Pi0, make_policy
from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.foundation.files import replacing_file
from tpuport.quantization.files import KEY

WEIGHTS, SIZES = "model.safetensors", "config.json"
_EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
# openpi's files have the embedding under the name of the head that shares it, and a head of the
# expert that nothing reads.
_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
_UNREAD = "paligemma_with_expert.gemma_expert.lm_head.weight"


def upstream_names(policy: Pi0) -> Iterator[str]:
    """Yield the names of a policy's weights in openpi's file."""
    yield from (_HEAD if name == _EMBEDDING else name for name, _ in policy.named_parameters())
    yield _UNREAD


def write_weights(folder: Path, policy: Pi0) -> None:
    """Write a policy in the form that openpi reads.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().contiguous() for name, value in policy.named_parameters()}
    embedding = weights.pop(_EMBEDDING)
    weights[_HEAD] = embedding
    weights[_UNREAD] = embedding.new_zeros(len(embedding), policy.config.expert.width)
    with replacing_file(folder / WEIGHTS) as temporary:
        save_file(weights, temporary, metadata={"format": "pt"})
    policy.config.save(folder / SIZES)


def read_weights(folder: Path) -> Pi0:
    """Read a policy of openpi's form, in the dtypes of the file.

    Raises:
        UsageError: There is no config.json, or the weights are integers.
        CheckpointError: A weight is missing, or has another shape.
    """
    config = read_config(folder / SIZES)
    opened = tpuport.open_checkpoint(folder / WEIGHTS)
    if KEY in opened.metadata:
        raise UsageError(
            f"{folder} has a policy that is quantized already, which only `serve` takes. What to"
            " do: give the folder of the float policy that it was made from"
        )
    with torch.device("meta"):
        policy = Pi0(config)
    weights = {}
    for name, parameter in policy.named_parameters():
        theirs = _HEAD if name == _EMBEDDING and _HEAD in opened else name
        value = opened.read(theirs) if theirs in opened else None
        if value is None or value.shape != parameter.shape:
            raise CheckpointError(
                f"{folder / WEIGHTS}: {theirs} is"
                f" {'not there' if value is None else tuple(value.shape)}, and {SIZES} beside it"
                f" asks for {tuple(parameter.shape)}. What to do: give the sizes of this policy"
            )
        weights[name] = value
    policy.load_state_dict(weights, strict=False, assign=True)
    return policy.eval()


def random_weights(config: Config, seed: int = 0) -> Pi0:
    """Return a policy with random weights and norms at one, all of whose layers count.

    In a fresh policy the gates of adaptive norms are zero, so its expert's layers do nothing.
    """
    policy = make_policy(config, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.paligemma_with_expert.parameters():
        if parameter.dim() > 1:
            fan_in = parameter[0].numel()
            torch.nn.init.normal_(parameter, std=fan_in**-0.5, generator=generator)
    return policy
