"""The options of a run, which determine its video, and the resolutions that the model knows."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipes.hunyuan_video.caching import StepCache
from tpuport.foundation.errors import UsageError

TASKS = ("t2v", "i2v")
# The side of a square with about as many pixels as each size in the bucket (upstream,
# hyvideo/pipelines/hunyuan_video_pipeline.py, target_size_config).
RESOLUTIONS = {"360p": 480, "480p": 640, "720p": 960, "1080p": 1440}
STRIDE = 16  # pixels of a latent's side
FRAMES_A_LATENT = 4


@dataclass(frozen=True)
class Options:
    """The settings of a run. Two runs with the same settings give the same video.

    Attributes:
        prompts: Text prompts, one video each.
        task: "t2v", or "i2v" with an image.
        image: File with the first frame, for i2v only.
        negative_prompt: What guidance leads away from.
        resolution: A name of `RESOLUTIONS`, which gives height and width together with `aspect`.
        aspect: Ratio of width and height, such as "16:9". For i2v the image's ratio is used.
        height: Height in pixels, which replaces resolution and aspect; a multiple of 16.
        width: Width in pixels, given together with the height.
        frames: Frames of the video, 4n + 1.
        steps: Denoising steps.
        guidance: Guidance scale; 1 for none, as distilled models need.
        shift: Shift of the noise schedule; None for that of the model's scheduler.
        seed: Random seed of the noise.
        precision: "bf16" or "float32", for all models.
        version: Version of the transformer, such as "720p_t2v", in upstream's layout. "" for its
            only one, and for diffusers' layout.
        cache: "deepcache", "teacache" or "taylorcache" to reuse block outputs of earlier steps;
            None for none of them.
        cache_start: See `caching.StepCache`.
        cache_end: See `caching.StepCache`.
        cache_interval: See `caching.StepCache`.
        low_resolution: For super-resolution, a digest of the latents that are made larger.
    """

    prompts: tuple[str, ...]
    task: str = "t2v"
    image: str | None = None
    negative_prompt: str = ""
    resolution: str = "720p"
    aspect: str = "16:9"
    height: int | None = None
    width: int | None = None
    frames: int = 121
    steps: int = 50
    guidance: float = 6.0
    shift: float | None = None
    seed: int = 0
    precision: str = "bf16"
    version: str = ""
    cache: str | None = None
    cache_start: int = 11
    cache_end: int = 45
    cache_interval: int = 4
    low_resolution: str = ""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise UsageError("prompts: expected at least one, got none")
        if self.task not in TASKS:
            raise UsageError(f"task={self.task!r}: expected one of {', '.join(TASKS)}")
        if (self.task == "i2v") != (self.image is not None):
            given = "no image" if self.image is None else f"image={self.image!r}"
            raise UsageError(
                f"task={self.task!r} with {given}. What to do: give an image with i2v, and none"
                " with t2v"
            )
        if self.image is not None and not Path(self.image).is_file():
            raise UsageError(f"image={self.image!r} is not there")
        if self.resolution not in RESOLUTIONS:
            raise UsageError(
                f"resolution={self.resolution!r}: expected one of {', '.join(RESOLUTIONS)}"
            )
        self._check_sizes()
        if self.steps < 1:
            raise UsageError(f"steps={self.steps}: expected at least 1")
        if self.guidance < 1:
            raise UsageError(f"guidance={self.guidance}: expected 1 (none) or more")
        _ = self.step_cache

    def _check_sizes(self) -> None:
        if self.frames < 1 or (self.frames - 1) % FRAMES_A_LATENT:
            below = max(self.frames - 1, 0) // FRAMES_A_LATENT * FRAMES_A_LATENT + 1
            raise UsageError(
                f"frames={self.frames}: expected {FRAMES_A_LATENT}n + 1, such as {below} or"
                f" {below + FRAMES_A_LATENT}"
            )
        if (self.height is None) != (self.width is None):
            raise UsageError(f"height={self.height} and width={self.width}: give both, or neither")
        for name, size in (("height", self.height), ("width", self.width)):
            if size is not None and (size < STRIDE or size % STRIDE):
                raise UsageError(f"{name}={size}: expected a multiple of {STRIDE}")
        parse_aspect(self.aspect)

    @property
    def has_guidance(self) -> bool:
        """Return whether each step computes the negative prompt, too."""
        return self.guidance > 1

    @property
    def step_cache(self) -> StepCache | None:
        """Return the steps that reuse results of others, or None."""
        if self.cache is None:
            return None
        return StepCache(self.cache, self.cache_start, self.cache_end, self.cache_interval)

    @property
    def latent_frames(self) -> int:
        """Return the number of frames of the latents."""
        return (self.frames - 1) // FRAMES_A_LATENT + 1


def parse_aspect(text: str) -> tuple[int, int]:
    """Return width and height of a ratio such as "16:9".

    Raises:
        UsageError: The text has another form.
    """
    width, _, height = text.partition(":")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise UsageError(f"aspect={text!r}: expected width:height, such as 16:9")
    return int(width), int(height)


def nearest_of_diffusers(height: int, width: int, base: int) -> tuple[int, int]:
    """Return the shape in a bucket that diffusers' pipelines choose.

    It is the nearest of those that are not more elongated than the video.
    """
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    processor = HunyuanVideo15ImageProcessor(vae_scale_factor=STRIDE)
    found = processor.calculate_default_height_width(height, width, base)
    return int(found[0]), int(found[1])


def size_of(
    options: Options, nearest: Callable[[int, int, int], tuple[int, int]] = nearest_of_diffusers
) -> tuple[int, int]:
    """Return height and width of the video in pixels.

    This is a shape in the resolution's bucket, near to the aspect; for i2v to the image's own.

    Args:
        options: Options of the run.
        nearest: Chooses a shape for a height, a width and the bucket's side.
    """
    if options.height is not None and options.width is not None:
        return options.height, options.width
    width, height = parse_aspect(options.aspect)
    if options.image is not None:
        from PIL import Image

        with Image.open(options.image) as image:
            width, height = image.size
    return nearest(height, width, RESOLUTIONS[options.resolution])
