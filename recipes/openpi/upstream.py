"""openpi's own PI0Pytorch from an untouched checkout (Physical-Intelligence/openpi).

It needs transformers 4.53.2 with four of its modules replaced by files of the checkout. openpi's
instructions copy these over the installed package; here an import hook puts them in front.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from recipes.openpi.config import CAMERAS, Config
from tpuport.foundation.errors import UsageError

VERSION = "4.53.2"
SOURCE = Path("src", "openpi")
REPLACED = Path("models_pytorch", "transformers_replace")
# Packages of the checkout, found without running their `__init__`, which may import flax.
_PACKAGES = ("openpi", "openpi.models", "openpi.models_pytorch", "openpi.shared")


class _Replacing(importlib.abc.MetaPathFinder):
    """Finds modules of transformers in the checkout's folder of replacements."""

    def __init__(self, folder: Path) -> None:
        self.files = {
            ".".join(("transformers", *path.relative_to(folder).with_suffix("").parts)): path
            for path in folder.rglob("*.py")
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where a module is replaced, or None."""
        del path, target
        found = self.files.get(fullname)
        return found and importlib.util.spec_from_file_location(fullname, found)


def _check(root: Path) -> None:
    import transformers

    if not (root / REPLACED).is_dir():
        raise UsageError(
            f"{root} is not there: no checkout of openpi with PyTorch models. What to do: git clone"
            " https://github.com/Physical-Intelligence/openpi, and give that folder"
        )
    if transformers.__version__ != VERSION:
        raise UsageError(
            f"openpi's classes want transformers {VERSION}, and {transformers.__version__} is"
            " installed. What to do: use an environment of its own, with pip install --no-deps"
            f" transformers=={VERSION} and the versions of huggingface-hub and tokenizers that it"
            " asks for"
        )


@contextlib.contextmanager
def upstream_policies(
    checkout: str | Path, config: Config, *, augment: bool = False
) -> Iterator[type[torch.nn.Module]]:
    """Import openpi's PI0Pytorch for policies of a size; use it inside the block.

    Args:
        checkout: Folder of the repository.
        config: Sizes of the policies.
        augment: Whether its loss changes images at random. That cuts a piece at a drawn place,
            which `tpuport.convert` refuses.

    Raises:
        UsageError: There is no checkout, or transformers has another version.
    """
    root = Path(checkout).resolve() / SOURCE
    _check(root)
    finder = _Replacing(root / REPLACED)
    stale = [n for n in sys.modules if n in finder.files or n.partition(".")[0] == "openpi"]
    before = {name: sys.modules.pop(name) for name in stale}
    sys.modules.update(_packages(root, config))
    sys.meta_path.insert(0, finder)
    try:
        module: Any = importlib.import_module("openpi.models_pytorch.pi0_pytorch")
        within: Any = importlib.import_module("openpi.models_pytorch.gemma_pytorch")
        _set_sizes(within, config)
        preprocess = module._preprocessing.preprocess_observation_pytorch
        module._preprocessing.preprocess_observation_pytorch = lambda observation, *, train: (
            preprocess(observation, train=train and augment)
        )
        yield module.PI0Pytorch
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n in finder.files or n.startswith("openpi")]:
            del sys.modules[name]
        sys.modules.update(before)


def make_upstream(policies: type[torch.nn.Module], config: Config) -> torch.nn.Module:
    """Return a policy of openpi's class in float32."""
    policy = policies(
        SimpleNamespace(
            pi05=config.pi05,
            paligemma_variant="language",
            action_expert_variant="expert",
            dtype="float32",
            action_dim=config.action_dim,
            action_horizon=config.action_horizon,
            max_token_len=config.max_token_len,
            pytorch_compile_mode=None,
        )
    )
    return policy.eval()


def _packages(root: Path, config: Config) -> dict[str, ModuleType]:
    """Return the checkout's packages, and in place of two modules in JAX what the policy reads."""
    made: dict[str, Any] = {}
    for name in _PACKAGES:
        made[name] = ModuleType(name)
        made[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    sizes = {
        name: SimpleNamespace(
            width=one.width,
            depth=one.depth,
            mlp_dim=one.mlp,
            num_heads=one.heads,
            num_kv_heads=one.kv_heads,
            head_dim=one.head_dim,
        )
        for name, one in (("language", config.language), ("expert", config.expert))
    }
    gemma: Any = ModuleType("openpi.models.gemma")
    gemma.get_config = sizes.__getitem__
    tools = ModuleType("openpi.shared.image_tools")
    return {**made, "openpi.models.gemma": gemma, "openpi.shared.image_tools": tools}


def _set_sizes(module: Any, config: Config) -> None:
    """Give models the sizes that openpi's class writes as numbers: those of vision, the vocabulary.

    Args:
        module: openpi's module that makes the models.
        config: The sizes.
    """
    paligemma, gemma = module.PaliGemmaForConditionalGeneration, module.GemmaForCausalLM
    sizes, vocab = config.vision, config.vocab_size

    def make_paligemma(*, config: Any) -> Any:
        config.text_config.vocab_size = config.image_token_index = config._vocab_size = vocab
        eyes = config.vision_config
        eyes.hidden_size, eyes.intermediate_size = sizes.width, sizes.mlp
        eyes.num_hidden_layers, eyes.num_attention_heads = sizes.depth, sizes.heads
        eyes.image_size, eyes.patch_size = sizes.image_size, sizes.patch_size
        eyes.projection_dim = config.text_config.hidden_size
        return paligemma(config=config)

    def make_gemma(*, config: Any) -> Any:
        config.vocab_size = vocab
        return gemma(config=config)

    module.PaliGemmaForConditionalGeneration, module.GemmaForCausalLM = make_paligemma, make_gemma


@dataclass
class Observation:
    """A batch in the form that openpi's class takes."""

    images: dict[str, torch.Tensor]
    image_masks: dict[str, torch.Tensor]
    state: torch.Tensor
    tokenized_prompt: torch.Tensor
    tokenized_prompt_mask: torch.Tensor
    token_ar_mask: torch.Tensor | None = None
    token_loss_mask: torch.Tensor | None = None


def observation_of(batch: dict[str, torch.Tensor]) -> Observation:
    """Return a batch of this recipe in openpi's form, whose images are 224 pixels wide."""
    pixels = batch["images"].float() / 255.0 * 2.0 - 1.0
    return Observation(
        {name: pixels[:, i].permute(0, 3, 1, 2) for i, name in enumerate(CAMERAS)},
        {name: batch["image_masks"][:, i] for i, name in enumerate(CAMERAS)},
        batch["state"],
        batch["tokens"],
        batch["token_mask"],
    )


def upstream_loss(policy: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return openpi's loss of a batch, with drawn noise and time unless the batch has them."""
    return policy(
        observation_of(batch), batch["actions"], batch.get("noise"), batch.get("time")
    ).mean()


def upstream_actions(
    policy: Any, batch: dict[str, torch.Tensor], noise: torch.Tensor, num_steps: int = 10
) -> torch.Tensor:
    """Return the actions that openpi's policy samples."""
    return policy.sample_actions(noise.device, observation_of(batch), noise, num_steps)
