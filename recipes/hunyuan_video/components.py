"""The components of a published model folder, each ported when it is asked for.

A folder is as diffusers publishes the model (hunyuanvideo-community on Hugging Face): one subfolder
a component with its configuration and weights in safetensors. Weights go from the files to the
devices; PyTorch never has a copy.
"""

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import torch

import tpuport
from recipes.hunyuan_video.options import Options
from recipes.quiet import quietly
from tpuport.errors import UsageError
from tpuport.model.ported import PortedModel

# Which classes are known, by component. What a folder names is not imported.
CLASSES = {
    "text_encoder": "transformers.Qwen2_5_VLTextModel",
    "text_encoder_2": "transformers.T5EncoderModel",
    "image_encoder": "transformers.SiglipVisionModel",
    "transformer": "diffusers.HunyuanVideo15Transformer3DModel",
    "vae": "diffusers.AutoencoderKLHunyuanVideo15",
}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
# What one library's classes put before names that another version's do not.
_PREFIXES = ("", "model.language_model.", "model.", "vision_model.", "language_model.")
_OF_HUGGING_FACE = re.compile(r"[\w.-]+/[\w.-]+")
# A whole chat model has more than its text model.
_NOT_OF_TEXT = ("visual.", "model.visual.", "lm_head.")


@dataclass(frozen=True)
class Components:
    """A model folder.

    Args:
        folder: has model_index.json.
        precision: of all models, a name of `DTYPES`.

    Raises:
        UsageError: there is no model there, or it is another one.
    """

    folder: Path
    precision: str = "bf16"

    def __post_init__(self) -> None:
        _ = self.index
        if self.precision not in DTYPES:
            raise UsageError(f"precision={self.precision!r}: expected one of {', '.join(DTYPES)}")

    @property
    def index(self) -> dict[str, Any]:
        """model_index.json."""
        index = read_json(
            self.folder / "model_index.json",
            "give the folder of a model, such as a download of hunyuanvideo-community's"
            " HunyuanVideo-1.5-Diffusers-720p_t2v, or what make-weights wrote",
        )
        for name, known in CLASSES.items():
            library, _, kind = known.partition(".")
            found = index.get(name, [library, kind])
            if found not in ([library, kind], [None, None]):
                raise UsageError(
                    f"{self.folder / 'model_index.json'}: {name} is {'.'.join(map(str, found))},"
                    f" expected {known}. What to do: give a folder of HunyuanVideo 1.5"
                )
        return index

    @property
    def kinds(self) -> Mapping[str, str]:
        """The class of each component, with its library."""
        return CLASSES

    def place(self, name: str) -> Path:
        """The folder of a component, tokenizer or image processor."""
        return self.folder / name

    def tracing(self) -> AbstractContextManager[Any]:
        """What has to hold while components are made and traced."""
        return nullcontext()

    def check(self, options: Options) -> None:
        """Raise unless the model is one for these options.

        Raises:
            UsageError: it is not.
        """
        del options

    @property
    def picture_width(self) -> int:
        """Features of a picture's tokens, as the transformer takes them."""
        return self.config("transformer")["image_embed_dim"]

    @property
    def dtype(self) -> Any:
        """What is computed in, as jax names it."""
        return jnp.dtype("bfloat16" if self.precision == "bf16" else "float32")

    def has(self, name: str) -> bool:
        """Whether there is such a component."""
        return self.place(name).is_dir()

    def config(self, name: str) -> dict[str, Any]:
        """The configuration of a component, as its JSON file has it."""
        return read_json(self.place(name) / "config.json", "download the whole folder of the model")

    def module(self, name: str, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """A component with shapes for weights, ready to be ported; buffers have values.

        Args:
            name: one of `CLASSES`.
            dtype: of the weights, by default that of the precision.

        Raises:
            UsageError: it is not there, or its configuration does not fit the class.
        """
        config = self.config(name)
        with quietly(), default_dtype(dtype or DTYPES[self.precision]), parameters_on_meta():
            try:
                made = make_model(self.kinds[name], config)
            except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
                raise UsageError(
                    f"{self.place(name) / 'config.json'} is no configuration of"
                    f" {self.kinds[name]}: {error}"
                ) from error
        return made.eval().requires_grad_(False)

    def ported(
        self,
        name: str,
        methods: tuple[str | Callable[..., Any], ...],
        shard: Callable[[PortedModel], None] | None = None,
    ) -> PortedModel:
        """A component with its weights on the devices.

        Args:
            name: one of `CLASSES`.
            methods: as for `tpuport.convert`.
            shard: puts the port on a mesh before its weights are read, by which each device gets
                its part only; None for one device.

        Raises:
            UsageError: it is not there.
            CheckpointError: its weights are damaged, or not those of its configuration.
        """
        # Eager PyTorch is not there to compare with: it would need a second copy of the weights.
        ported = tpuport.convert(self.module(name), methods=methods, verify=False)
        if shard is not None:
            shard(ported)
        self.load(ported, name)
        return ported

    def load(self, ported: PortedModel, name: str) -> None:
        """Read a component's weights into a port of its `module`.

        Raises:
            CheckpointError: they are damaged, or not those of its configuration.
        """
        opened = tpuport.open_checkpoint(self.place(name))
        ported.load(opened, rename=renaming(opened, {*ported.params, *ported.buffers}))

    def weights(self, name: str) -> list[Path]:
        """The files with a component's weights."""
        return sorted(self.place(name).glob("*.safetensors"))

    def tokenizer(self, name: str) -> Any:
        """A tokenizer: "tokenizer" or "tokenizer_2"."""
        from transformers import AutoTokenizer

        self._check_there(name)
        with quietly():
            return AutoTokenizer.from_pretrained(self.place(name))

    def image_processor(self) -> Any:
        """What makes SigLIP's pixels of a picture, without torchvision."""
        from transformers import SiglipImageProcessorPil

        self._check_there("feature_extractor")
        with quietly():
            return SiglipImageProcessorPil.from_pretrained(self.place("feature_extractor"))

    def scheduler(self) -> Any:
        """The flow-matching scheduler with the model's shift."""
        config = read_json(
            self.folder / "scheduler" / "scheduler_config.json", "download the whole folder"
        )
        kind = _class("diffusers.FlowMatchEulerDiscreteScheduler")
        return kind.from_config(config)

    def _check_there(self, name: str) -> None:
        if not self.has(name):
            what = self.place(name).relative_to(self.folder)
            raise UsageError(
                f"{self.folder} has no {what}. What to do: download the whole folder of the model"
            )


def renaming(opened: Any, wanted: set[str]) -> Callable[[str], str | None] | None:
    """How a checkpoint's names become the model's, where only what stands before them differs."""
    names = {name for name in opened if not name.startswith(_NOT_OF_TEXT)}
    if names & wanted and len(names) == len(opened):
        return None
    for prefix in _PREFIXES:
        if {name.removeprefix(prefix) for name in names} & wanted:
            return lambda name: name.removeprefix(prefix) if name in names else None
        if {prefix + name for name in names} & wanted:
            return lambda name: prefix + name
    return None


def read_json(path: Path, what_to_do: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UsageError: it is not there, or is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}. What to do: {what_to_do}") from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}. What to do: {what_to_do}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} is no JSON object. What to do: {what_to_do}")
    return found


def model_folder(name: str | Path) -> Path:
    """A folder, or that of a model on Hugging Face ("owner/name") which is in the cache here.

    Nothing is downloaded.

    Raises:
        UsageError: it is no folder, and looks like such a name, and the cache does not have it.
    """
    path = Path(name)
    if path.exists() or not _OF_HUGGING_FACE.fullmatch(str(name)):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise UsageError(
            f"{name} is no folder, and Hugging Face's cache does not have it. What to do:"
            f" `hf download {name}`, or give a folder"
        ) from error


def make_model(kind: str, config: dict[str, Any]) -> torch.nn.Module:
    """A model of a class as `CLASSES` names it, from its library's configuration."""
    found = _class(kind)
    if not kind.startswith("transformers."):
        return found.from_config(config)
    settings = found.config_class.from_dict(config)
    settings._attn_implementation = "sdpa"
    return found(settings)


def _class(name: str) -> Any:
    library, _, kind = name.rpartition(".")
    if kind == "Qwen2_5_VLTextModel":
        # transformers does not export it.
        return getattr(importlib.import_module("transformers.models.qwen2_5_vl"), kind)
    return getattr(importlib.import_module(library), kind)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New parameters are of this dtype; what a module computes in float32 by name stays so."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters of new modules are shapes; buffers have values, since no checkpoint holds some."""
    kind: Any = torch.nn.Module
    register = kind.register_parameter

    def registered(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        # One that is there already may be tied to another: it stays the same object.
        if param is not None and not param.is_meta:
            param = torch.nn.Parameter(param.to("meta"), param.requires_grad)
        register(module, name, param)

    kind.register_parameter = registered
    try:
        yield
    finally:
        kind.register_parameter = register
