"""What decides a video: the options of a run, and the resolutions that the model knows."""

from dataclasses import dataclass
from pathlib import Path

from recipes.hunyuan_video.caching import StepCache
from tpuport.errors import UsageError

TASKS = ("t2v", "i2v")
# The side of a square of as many pixels, by name: the buckets are all shapes of about that size
# (upstream, hyvideo/pipelines/hunyuan_video_pipeline.py, target_size_config).
RESOLUTIONS = {"360p": 480, "480p": 640, "720p": 960, "1080p": 1440}
STRIDE = 16  # pixels of a latent's side
FRAMES_A_LATENT = 4


@dataclass(frozen=True)
class Options:
    """What a run computes; two runs with the same ones give the same video.

    Attributes:
        prompts: one video each.
        task: "t2v", or "i2v" with an image.
        image: of the first frame, a file; of i2v only.
        negative_prompt: what guidance leads away from.
        resolution: a name of `RESOLUTIONS`; with `aspect` it gives height and width.
        aspect: width and height, such as "16:9"; for i2v the image's own is taken.
        height: in pixels, in place of both; a multiple of 16.
        width: likewise.
        frames: 4n + 1.
        steps: of denoising.
        guidance: 1 for none, as distilled models want it.
        shift: of the noise schedule; None for that of the model's scheduler.
        seed: of the noise.
        precision: "bf16" or "float32", of all models.
        version: of the transformer, such as "720p_t2v", in a folder of upstream's; "" for its only
            one, and for folders of diffusers.
        cache: "deepcache" or "teacache" to reuse what blocks gave in earlier steps; None for none.
        cache_start: see `caching.StepCache`, as for the others.
        cache_end: likewise.
        cache_interval: likewise.
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
        """Whether each step computes the negative prompt, too."""
        return self.guidance > 1

    @property
    def step_cache(self) -> StepCache | None:
        """Which steps reuse what of others."""
        if self.cache is None:
            return None
        return StepCache(self.cache, self.cache_start, self.cache_end, self.cache_interval)

    @property
    def latent_frames(self) -> int:
        """Frames of the latents."""
        return (self.frames - 1) // FRAMES_A_LATENT + 1


def parse_aspect(text: str) -> tuple[int, int]:
    """Width and height of "16:9".

    Raises:
        UsageError: it is something else.
    """
    width, _, height = text.partition(":")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise UsageError(f"aspect={text!r}: expected width:height, such as 16:9")
    return int(width), int(height)


def size_of(options: Options) -> tuple[int, int]:
    """Height and width of the video, in pixels.

    The nearest shape of the resolution's buckets, as diffusers' pipelines choose it; for i2v the
    nearest to the image's own.
    """
    if options.height is not None and options.width is not None:
        return options.height, options.width
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    width, height = parse_aspect(options.aspect)
    if options.image is not None:
        from PIL import Image

        with Image.open(options.image) as image:
            width, height = image.size
    processor = HunyuanVideo15ImageProcessor(vae_scale_factor=STRIDE)
    found = processor.calculate_default_height_width(height, width, RESOLUTIONS[options.resolution])
    return int(found[0]), int(found[1])
