"""A run's folder: what each stage leaves for the next, so that a run that was ended goes on.

run.json                  options of the run and which model it is of
conditions.safetensors    of `encode`
denoising.safetensors     latents after some steps, while `denoise` runs
latents.safetensors       of `denoise`
video.mp4                 of `decode`; of several prompts video-1.mp4, video-2.mp4 and so on
video/                    in its place a picture a frame, if these were asked for
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tpuport
from recipes.hunyuan_video.components import CLASSES, Components, read_json
from recipes.hunyuan_video.options import Options
from recipes.hunyuan_video.upstream import open_components
from recipes.hunyuan_video.video import psnr
from recipes.records import check_record, digest_of
from tpuport.errors import UsageError

RECORD = "run.json"
LATENTS = "latents.safetensors"


@dataclass(frozen=True)
class Run:
    """A folder that a run has been begun in.

    Attributes:
        folder: where it is.
        components: the model.
        options: of the run.
    """

    folder: Path
    components: Components
    options: Options

    @classmethod
    def begin(cls, model: str | Path, folder: str | Path, options: Options) -> "Run":
        """A new run, or the one that the folder has been begun with.

        Raises:
            UsageError: it was begun with other options or another model.
        """
        folder = Path(folder)
        components = open_components(model, options.precision, options.version)
        components.check(options)
        run = cls(folder, components, options)
        record = {**dataclasses.asdict(options), "prompts": list(options.prompts)}
        if options.image is not None:
            record["picture"] = digest_of([Path(options.image)])
        check_record(
            folder / RECORD,
            {**record, **_model(components)},
            begun=any(path.exists() for path in (run.conditions, run.partial, run.latents)),
            what_to_do="give the options that it was begun with, or another --out",
            replace_unused=True,
        )
        return run

    @classmethod
    def open(cls, model: str | Path, folder: str | Path) -> "Run":
        """The run that a folder has been begun with.

        Raises:
            UsageError: there is none, or it is of another model.
        """
        path = Path(folder) / RECORD
        record = read_json(path, "begin with `encode` or `generate`, which write it")
        names = {field.name for field in dataclasses.fields(Options)}
        try:
            given = {name: record[name] for name in names}
        except KeyError as error:
            raise UsageError(f"{path} has no {error}: it is of another version") from error
        return cls.begin(model, folder, Options(**{**given, "prompts": (*given["prompts"],)}))

    @property
    def conditions(self) -> Path:
        """What `encode` writes."""
        return self.folder / "conditions.safetensors"

    @property
    def partial(self) -> Path:
        """What `denoise` writes now and then."""
        return self.folder / "denoising.safetensors"

    @property
    def latents(self) -> Path:
        """What `denoise` writes at the end."""
        return self.folder / LATENTS

    def videos(self, kind: str = "mp4") -> list[Path]:
        """What `decode` writes, by prompt: files, or folders of pictures for "png"."""
        count, ending = len(self.options.prompts), "" if kind == "png" else f".{kind}"
        names = ["video"] if count == 1 else [f"video-{n}" for n in range(1, count + 1)]
        return [self.folder / f"{name}{ending}" for name in names]

    def read(self, path: Path, stage: str) -> dict[str, jax.Array]:
        """The arrays of a file of an earlier stage.

        Raises:
            UsageError: that stage has not ended.
            CheckpointError: the file is damaged.
        """
        if not path.is_file():
            raise UsageError(f"{path} is not there. What to do: run `{stage}` first")
        return tpuport.load_checkpoint(path)

    def write(self, path: Path, arrays: Mapping[str, Any]) -> None:
        """Write a file whole or not at all.

        Raises:
            CheckpointError: the disk is full.
        """
        tpuport.save_checkpoint(path, arrays)

    def about(self) -> dict[str, Any]:
        """What is said in a video's file."""
        from importlib.metadata import version

        versions = {n: version(n) for n in ("torch", "jax", "torchax", "diffusers", "transformers")}
        options = dataclasses.asdict(self.options)
        return {**options, "versions": {"tpuport": tpuport.__version__, **versions}}


def latents_apart(left: Path, right: Path) -> tuple[float, float] | None:
    """How far the latents of one run are from those of another.

    Args:
        left: a file of `denoise`, what is compared with.
        right: another one.

    Returns:
        PSNR in decibels, of the range of the first one's values, and cosine; None if they have
        different shapes.

    Raises:
        CheckpointError: a file is damaged.
    """
    first, second = (
        np.asarray(tpuport.load_checkpoint(path)["latents"], np.float64) for path in (left, right)
    )
    if first.shape != second.shape:
        return None
    lengths = np.linalg.norm(first) * np.linalg.norm(second)
    decibels = psnr(first, second, float(np.ptp(first)))
    return decibels, float((first * second).sum() / lengths)


def _model(components: Components) -> dict[str, str]:
    """Which model it is, by its configurations and the ends of its weights."""
    names = [name for name in CLASSES if components.has(name)]
    configs = [components.place(name) / "config.json" for name in names]
    weights = [path for name in names for path in components.weights(name)]
    index = components.folder / "model_index.json"
    return {"model": digest_of([*([index] if index.is_file() else []), *configs, *weights])}
