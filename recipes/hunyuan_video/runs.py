"""The folder of a run, with the result of each stage, from which a run that ended early is resumed.

run.json                  options of the run and which model it is of
conditions.safetensors    of `encode`
denoising.safetensors     latents after some steps, while `denoise` runs
latents.safetensors       of `denoise`
video.mp4                 of `decode`; of several prompts video-1.mp4, video-2.mp4 and so on
video/                    in its place a picture a frame, if these were asked for
1080p/                    of `upscale` a run of its own, with the same files
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tpuport
from recipes.hunyuan_video.components import Components, read_json
from recipes.hunyuan_video.options import Options
from recipes.hunyuan_video.upstream import open_components
from recipes.hunyuan_video.video import psnr
from recipes.records import check_record, digest_of
from tpuport.foundation.errors import UsageError

RECORD = "run.json"
LATENTS = "latents.safetensors"


@dataclass(frozen=True)
class Run:
    """The folder in which a run was begun.

    Attributes:
        folder: Path of the folder.
        components: The model.
        options: Options of the run.
    """

    folder: Path
    components: Components
    options: Options

    @classmethod
    def begin(cls, model: str | Path, folder: str | Path, options: Options) -> "Run":
        """Begin a run, or return the one that the folder has.

        Raises:
            UsageError: It was begun with other options or another model.
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
        """Return the run that a folder has.

        Raises:
            UsageError: There is none, or it is of another model.
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
        """Return the file that `encode` writes."""
        return self.folder / "conditions.safetensors"

    @property
    def partial(self) -> Path:
        """Return the file that `denoise` writes now and then."""
        return self.folder / "denoising.safetensors"

    @property
    def latents(self) -> Path:
        """Return the file that `denoise` writes at the end."""
        return self.folder / LATENTS

    def videos(self, kind: str = "mp4") -> list[Path]:
        """Return what `decode` writes for each prompt: files, or folders of pictures for "png"."""
        count, ending = len(self.options.prompts), "" if kind == "png" else f".{kind}"
        names = ["video"] if count == 1 else [f"video-{n}" for n in range(1, count + 1)]
        return [self.folder / f"{name}{ending}" for name in names]

    def read(self, path: Path, stage: str) -> dict[str, jax.Array]:
        """Return the arrays in a file of an earlier stage.

        Raises:
            UsageError: That stage has not ended.
            CheckpointError: The file is damaged.
        """
        self.expect(path, stage)
        return tpuport.load_checkpoint(path)

    def expect(self, path: Path, stage: str) -> None:
        """Raise an error unless an earlier stage has written a file.

        Raises:
            UsageError: That stage has not ended.
        """
        if not path.is_file():
            raise UsageError(f"{path} is not there. What to do: run `{stage}` first")

    def write(self, path: Path, arrays: Mapping[str, Any]) -> None:
        """Write a file atomically.

        Raises:
            CheckpointError: The disk is full.
        """
        tpuport.save_checkpoint(path, arrays)

    def about(self) -> dict[str, Any]:
        """Return the metadata for a video's file: options and versions."""
        from importlib.metadata import version

        versions = {n: version(n) for n in ("torch", "jax", "torchax", "diffusers", "transformers")}
        options = dataclasses.asdict(self.options)
        return {**options, "versions": {"tpuport": tpuport.__version__, **versions}}


def latents_apart(left: Path, right: Path) -> tuple[float, float] | None:
    """Return the PSNR and the cosine of the latents of two runs.

    Args:
        left: A file of `denoise`, the reference.
        right: The file to compare with it.

    Returns:
        PSNR in decibels, with the range of the first one's values as peak, and cosine; None if the
        shapes differ.

    Raises:
        CheckpointError: A file is damaged.
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
    """Return a digest of the model's configurations and of the ends of its weight files."""
    names = [name for name in components.kinds if components.has(name)]
    configs = [components.place(name) / "config.json" for name in names]
    weights = [path for name in names for path in components.weights(name)]
    index = components.folder / "model_index.json"
    return {"model": digest_of([*([index] if index.is_file() else []), *configs, *weights])}
