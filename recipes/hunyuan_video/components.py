"""The components of a published model folder, each ported when it is asked for.

The layout is that of diffusers (hunyuanvideo-community on Hugging Face): one subfolder per
component, with its configuration and its weights in safetensors. Weights go from the files straight
to the devices; PyTorch never holds a copy.
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
from recipes.hunyuan_video.options import Options, size_of
from recipes.quiet import quietly
from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel

# The known classes by component. A class that a folder names is never imported by that name.
CLASSES = {
    "text_encoder": "transformers.Qwen2_5_VLTextModel",
    "text_encoder_2": "transformers.T5EncoderModel",
    "image_encoder": "transformers.SiglipVisionModel",
    "transformer": "diffusers.HunyuanVideo15Transformer3DModel",
    "vae": "diffusers.AutoencoderKLHunyuanVideo15",
}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
# Prefixes that one version of a library puts before weight names and another does not.
_PREFIXES = ("", "model.language_model.", "model.", "vision_model.", "language_model.")
_OF_HUGGING_FACE = re.compile(r"[\w.-]+/[\w.-]+")
# Weights of a complete chat model that its text model does not have.
_NOT_OF_TEXT = ("visual.", "model.visual.", "lm_head.")


@dataclass(frozen=True)
class Components:
    """A model folder in diffusers' layout.

    Args:
        folder: Folder with model_index.json.
        precision: Precision of all models, a name of `DTYPES`.

    Raises:
        UsageError: The folder has no model, or a different one.
    """

    folder: Path
    precision: str = "bf16"

    def __post_init__(self) -> None:
        _ = self.index
        if self.precision not in DTYPES:
            raise UsageError(f"precision={self.precision!r}: expected one of {', '.join(DTYPES)}")

    @property
    def index(self) -> dict[str, Any]:
        """Return the contents of model_index.json."""
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
        """Return the class of each component, with its library."""
        return CLASSES

    def place(self, name: str) -> Path:
        """Return the folder of a component, tokenizer or image processor."""
        return self.folder / name

    def tracing(self) -> AbstractContextManager[Any]:
        """Return the context in which components are made and traced."""
        return nullcontext()

    def check(self, options: Options) -> None:
        """Raise an error unless the model supports these options.

        Raises:
            UsageError: It does not.
        """
        del options

    @property
    def picture_width(self) -> int:
        """Return the width of a picture's tokens, as the transformer takes them."""
        return self.config("transformer")["image_embed_dim"]

    @property
    def noise_dtype(self) -> torch.dtype:
        """Return the dtype in which the pipeline of this layout draws noise."""
        return DTYPES[self.precision]

    @property
    def quotes_of_negatives(self) -> bool:
        """Return whether the pipeline of this layout reads quotes in the negative prompt."""
        return True

    def size_of(self, options: Options) -> tuple[int, int]:
        """Return height and width of the video, as the pipeline of this layout chooses them."""
        return size_of(options)

    def fitted(self, image: Any, size: tuple[int, int]) -> Any:
        """Resize a picture and cut its middle, as the pipeline of this layout does.

        Args:
            image: A picture of PIL's.
            size: Height and width.
        """
        from diffusers.pipelines.hunyuan_video1_5.image_processor import (
            HunyuanVideo15ImageProcessor,
        )

        processor = HunyuanVideo15ImageProcessor(do_resize=False)
        return processor.resize(image, height=size[0], width=size[1], resize_mode="crop")

    @property
    def dtype(self) -> Any:
        """Return the dtype of the computation, as a jax dtype."""
        return jnp.dtype("bfloat16" if self.precision == "bf16" else "float32")

    def has(self, name: str) -> bool:
        """Return whether the folder has such a component."""
        return self.place(name).is_dir()

    def config(self, name: str) -> dict[str, Any]:
        """Return the configuration of a component, read from its JSON file."""
        return read_json(
            self.place(name) / "config.json", "download the complete folder of the model"
        )

    def module(self, name: str, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Return a component ready to be ported, with its parameters on the meta device.

        Its buffers have values.

        Args:
            name: One of `CLASSES`.
            dtype: Dtype of the weights, by default that of the precision.

        Raises:
            UsageError: The component is missing, or its configuration does not fit the class.
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
        dtype: torch.dtype | None = None,
    ) -> PortedModel:
        """Return a ported component with its weights on the devices.

        Args:
            name: One of `CLASSES`.
            methods: Passed to `tpuport.convert`.
            shard: Shards the port on a mesh before its weights are read, so that each device reads
                only its part. None for one device.
            dtype: See `module`.

        Raises:
            UsageError: The component is missing.
            CheckpointError: Its weights are damaged, or do not fit its configuration.
        """
        # Verifying against eager PyTorch would need a second copy of the weights.
        ported = tpuport.convert(self.module(name, dtype), methods=methods, verify=False)
        if shard is not None:
            shard(ported)
        self.load(ported, name)
        return ported

    def load(self, ported: PortedModel, name: str, part: str = "") -> None:
        """Read a component's weights into a port of its `module`.

        Args:
            ported: The port.
            name: One of `CLASSES`.
            part: Submodule that the port has, whose weights alone are read; "" for all.

        Raises:
            CheckpointError: They are damaged, or do not fit its configuration.
        """
        opened = tpuport.open_checkpoint(self.place(name))
        if part:
            ported.load(opened, rename=lambda name: name if name.startswith(f"{part}.") else None)
        else:
            ported.load(opened, rename=renaming(opened, {*ported.params, *ported.buffers}))

    def weights(self, name: str) -> list[Path]:
        """Return the files with a component's weights."""
        return sorted(self.place(name).glob("*.safetensors"))

    def tokenizer(self, name: str) -> Any:
        """Return the tokenizer "tokenizer" or "tokenizer_2"."""
        from transformers import AutoTokenizer

        self._check_there(name)
        with quietly():
            return AutoTokenizer.from_pretrained(self.place(name))

    def image_processor(self) -> Any:
        """Return the processor that turns a picture into SigLIP's pixels, without torchvision."""
        from transformers import SiglipImageProcessorPil

        self._check_there("feature_extractor")
        with quietly():
            return SiglipImageProcessorPil.from_pretrained(self.place("feature_extractor"))

    def scheduler(self) -> Any:
        """Return the flow-matching scheduler with the model's shift."""
        config = read_json(
            self.folder / "scheduler" / "scheduler_config.json", "download the complete folder"
        )
        kind = _class("diffusers.FlowMatchEulerDiscreteScheduler")
        return kind.from_config(config)

    def _check_there(self, name: str) -> None:
        if not self.has(name):
            what = self.place(name).relative_to(self.folder)
            raise UsageError(
                f"{self.folder} has no {what}. What to do: download the complete folder of the"
                " model"
            )


def release(ported: PortedModel) -> None:
    """Free the weights of a port that is not called again.

    A port is in cycles, which the garbage collector finds some time, and chips do not hold the
    weights of two stages.
    """
    for array in (*ported.params.values(), *ported.buffers.values()):
        array.delete()


def renaming(opened: Any, wanted: set[str]) -> Callable[[str], str | None] | None:
    """Return a function from a checkpoint's names to the model's, where only a prefix differs."""
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
    """Return the JSON object in a file.

    Raises:
        UsageError: The file is missing or is not a JSON object.
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
    """Return a folder, or the cached one of a model on Hugging Face ("owner/name").

    Nothing is downloaded.

    Raises:
        UsageError: It is no folder, and the cache has no model of that name.
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
    """Return a model of a class of `CLASSES`, made from its library's configuration."""
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
    """Make new parameters of this dtype. Modules that name float32 themselves keep it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of new modules on the meta device.

    Buffers keep their values, since checkpoints lack some of them.
    """
    kind: Any = torch.nn.Module
    register = kind.register_parameter

    def registered(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        # A parameter that is on the meta device already may be tied, and must stay the same object.
        if param is not None and not param.is_meta:
            param = torch.nn.Parameter(param.to("meta"), param.requires_grad)
        register(module, name, param)

    kind.register_parameter = registered
    try:
        yield
    finally:
        kind.register_parameter = register
