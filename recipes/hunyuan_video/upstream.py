"""Upstream's own folder of the model (tencent/HunyuanVideo-1.5), run with upstream's own classes.

transformer/720p_t2v and so on, vae           hyvideo's classes, untouched
text_encoder/llm                              Qwen2.5-VL, of which the text model is taken
text_encoder/byt5-small                       configuration and tokenizer of the glyphs' encoder
text_encoder/Glyph-SDXL-v2/checkpoints        its weights
vision_encoder/siglip                         SigLIP, with image_encoder and feature_extractor
transformer/1080p_sr_distilled, upsampler/1080p_sr_distilled and of 720p: super-resolution
"""

import importlib
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tpuport
from recipes.hunyuan_video.components import CLASSES, Components, model_folder
from recipes.hunyuan_video.options import STRIDE, Options, size_of
from tpuport.foundation.errors import UsageError
from tpuport.kernels.attention.dispatch import AttentionWarning
from tpuport.model.ported_model import PortedModel

KINDS = {
    **CLASSES,
    "transformer": "hyvideo.models.transformers.hunyuanvideo_1_5_transformer"
    ".HunyuanVideo_1_5_DiffusionTransformer",
    "vae": "hyvideo.models.autoencoders.hunyuanvideo_15_vae.AutoencoderKLConv3D",
}
_UPSAMPLE = "hyvideo.models.transformers.modules.upsample"
_PLACES = {
    "vae": "vae",
    "text_encoder": "text_encoder/llm",
    "tokenizer": "text_encoder/llm",
    "text_encoder_2": "text_encoder/byt5-small",
    "tokenizer_2": "text_encoder/byt5-small",
    "image_encoder": "vision_encoder/siglip/image_encoder",
    "feature_extractor": "vision_encoder/siglip/feature_extractor",
}
GLYPHS = "text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt"
GLYPH_PREFIX = "module.text_tower.encoder."
# Part of a tile that the next repeats, on an accelerator of more than 21 GB (upstream,
# hyvideo/pipelines/hunyuan_video_pipeline.py, get_vae_inference_config).
_OVERLAP = 0.125
_SPARSE = "flex-block-attn"
# Shift of the noise schedule by the prefix of a version (upstream, hyvideo/commons, flow_shift).
_SHIFTS = {
    "480p_i2v_step_distilled": 7.0,
    "480p": 5.0,
    "720p_t2v": 9.0,
    "720p_i2v": 7.0,
    "720p_sr": 2.0,
    "1080p_sr": 2.0,
}


@dataclass(frozen=True)
class UpstreamComponents(Components):
    """A model folder in upstream's layout.

    Args:
        folder: Folder with transformer/<version>.
        precision: Precision of all models.
        version: Version of the transformer, such as "720p_t2v_distilled"; "" for its only one.

    Raises:
        UsageError: There is no such version, or more than one to choose from, or upstream's code is
            not installed.
    """

    version: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if importlib.util.find_spec("hyvideo") is None:
            raise UsageError(
                f"{self.folder} is upstream's own folder, which runs by upstream's own classes, and"
                " they are not there. What to do: pip install --no-deps hyvideo-fork, or put a"
                " checkout of HunyuanVideo-1.5 on PYTHONPATH, or give a folder of diffusers"
            )

    @property
    def index(self) -> dict[str, Any]:
        """Return the name of the chosen transformer, the only thing that identifies the model."""
        found = versions(self.folder)
        first = [name for name in found if not _makes_larger(name)]
        name = self.version or (first[0] if len(first) == 1 else "")
        if name not in found:
            given = f"version={self.version!r}" if self.version else "no version"
            what = "choose one by --version"
            if _makes_larger(name):
                what = f"add transformer/{name} and upsampler/{name} of tencent/HunyuanVideo-1.5"
            raise UsageError(
                f"{self.folder / 'transformer'} has {', '.join(first) or 'none'}, and {given} was"
                f" given. What to do: {what}"
            )
        return {"transformer": name}

    @property
    def kinds(self) -> Mapping[str, str]:
        """Return the class of each component, with its library."""
        resolution = self.index["transformer"].partition("_")[0]
        return {**KINDS, "upsampler": f"{_UPSAMPLE}.SRTo{resolution}Upsampler"}

    def place(self, name: str) -> Path:
        """Return the folder of a component, tokenizer or image processor."""
        if name in ("transformer", "upsampler"):
            return self.folder / name / self.index["transformer"]
        return self.folder / _PLACES[name]

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Set up a porting context, which upstream's code needs to run without CUDA."""
        with (
            warnings.catch_warnings(),
            tpuport.porting("hyvideo", absent=["loguru"], port_modules=False),
        ):
            # Upstream packs the few tokens of text into one row whatever attn_mode is.
            warnings.filterwarnings("ignore", "Attention has batch of 1,", AttentionWarning)
            yield

    def check(self, options: Options) -> None:
        """Raise an error unless the model supports these options.

        Raises:
            UsageError: It is distilled and guidance is asked for, or it is for the other task or
                for super-resolution.
        """
        name = self.index["transformer"]
        if "distilled" in name and options.has_guidance:
            raise UsageError(
                f"guidance={options.guidance} with {name}, which is distilled. What to do: give 1"
            )
        if _makes_larger(name):
            if not options.low_resolution:
                raise UsageError(
                    f"version={name!r} only makes the video of a run larger. What to do: begin with"
                    " another version, and give --super-resolution, or `upscale` the run"
                )
        elif f"_{options.task}" not in name:
            raise UsageError(f"task={options.task!r} with {name}, which is for the other one")

    @property
    def noise_dtype(self) -> torch.dtype:
        """Return the dtype in which upstream draws noise, whatever it computes in."""
        return torch.bfloat16

    @property
    def quotes_of_negatives(self) -> bool:
        """Return that upstream gives byT5 no text of the negative prompt."""
        return False

    def size_of(self, options: Options) -> tuple[int, int]:
        """Return height and width of the video: the bucket's shape with the nearest ratio."""
        return size_of(options, _nearest)

    def fitted(self, image: Any, size: tuple[int, int]) -> Any:
        """Resize a picture and cut its middle, which diffusers rounds to another row."""
        from PIL import Image

        height, width = size
        return Image.fromarray(_data_utils().resize_and_center_crop(np.array(image), width, height))

    def module(self, name: str, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Return a component ready to be ported; the VAE with the tiles that upstream sets."""
        made: Any = super().module(name, dtype)
        if name == "vae":
            made.set_tile_sample_min_size(made.tile_sample_min_size, _OVERLAP)
        return made

    @property
    def picture_width(self) -> int:
        """Return the width of a picture's tokens, as the transformer takes them."""
        return self.config("transformer")["vision_states_dim"]

    def config(self, name: str) -> dict[str, Any]:
        """Return the configuration of a component, read from its JSON file."""
        found = super().config(name)
        if name == "transformer":
            # "torch" computes what flash-attn does, whose packed rows could not be sharded over
            # chips. A version with sparse attention was trained with it, so it keeps that.
            mode = found.get("attn_mode")
            return {**found, "attn_mode": mode if mode == _SPARSE else "torch"}
        if name == "text_encoder":
            return found.get("text_config", found)
        if name == "text_encoder_2":
            # The vocabulary is larger than byT5's: colours and fonts have tokens of their own.
            rows = self._glyphs()[GLYPH_PREFIX + "embed_tokens.weight"].shape[0]
            return {**found, "vocab_size": rows, "is_encoder_decoder": False}
        return found

    def weights(self, name: str) -> list[Path]:
        """Return the files with a component's weights."""
        return [self.folder / GLYPHS] if name == "text_encoder_2" else super().weights(name)

    def load(self, ported: PortedModel, name: str, part: str = "") -> None:
        """Read a component's weights into a port of its `module`.

        Raises:
            CheckpointError: They are damaged, or do not fit its configuration.
        """
        if name != "text_encoder_2":
            super().load(ported, name, part)
            return

        def rename(name: str) -> str | None:
            if not name.startswith(GLYPH_PREFIX):
                return None
            name = name.removeprefix(GLYPH_PREFIX)
            return "shared.weight" if name == "embed_tokens.weight" else f"encoder.{name}"

        ported.load(self._glyphs(), rename=rename)

    def scheduler(self) -> Any:
        """Return the flow-matching scheduler with the version's shift."""
        diffusers: Any = importlib.import_module("diffusers")
        name = self.index["transformer"]
        shifts = [shift for start, shift in _SHIFTS.items() if name.startswith(start)]
        if not shifts:
            raise UsageError(
                f"{name}: expected a version that begins with {', '.join(_SHIFTS)}. What to do:"
                " give --shift"
            )
        return diffusers.FlowMatchEulerDiscreteScheduler(shift=shifts[0])

    def _glyphs(self) -> Any:
        return tpuport.open_checkpoint(self.folder / GLYPHS)


def _nearest(height: int, width: int, base: int) -> tuple[int, int]:
    utils = _data_utils()
    sizes = utils.generate_crop_size_list(base, STRIDE)
    ratios = [round(height / width, 5) for height, width in sizes]
    found = utils.get_closest_ratio(height, width, ratios, sizes)[0]
    return int(found[0]), int(found[1])


@cache
def _data_utils() -> Any:
    """Return upstream's module of buckets, from its file.

    An import of the package has to wait for a porting context, which rewrites it.
    """
    package: Any = importlib.util.find_spec("hyvideo")
    path = Path(*package.submodule_search_locations, "utils", "data_utils.py")
    spec: Any = importlib.util.spec_from_file_location("hyvideo_data_utils", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _makes_larger(version: str) -> bool:
    """Return whether a version of the transformer is for super-resolution."""
    return "_sr_" in version


def versions(folder: Path) -> list[str]:
    """Return the names of the transformers in a folder of upstream's layout."""
    return sorted(path.parent.name for path in folder.glob("transformer/*/config.json"))


def open_components(folder: str | Path, precision: str, version: str = "") -> Components:
    """Open a model folder in diffusers' layout or in upstream's.

    Args:
        folder: The model, see `components.model_folder`.
        precision: Precision of all models.
        version: Version of the transformer; for upstream's layout only.

    Raises:
        UsageError: There is no model, or another one.
    """
    folder = model_folder(folder)
    if not (folder / "model_index.json").is_file() and versions(folder):
        return UpstreamComponents(folder, precision, version)
    if version:
        raise UsageError(
            f"version={version!r}: {folder} is not in upstream's layout, which has transformer/"
            f"{version}/config.json. What to do: give the folder of the version that is wanted"
        )
    return Components(folder, precision)
