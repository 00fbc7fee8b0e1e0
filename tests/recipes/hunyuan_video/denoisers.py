"""A denoiser of a model folder, with its prompts encoded."""

from typing import Any

from recipes.hunyuan_video.components import Components
from recipes.hunyuan_video.conditions import rows_of
from recipes.hunyuan_video.denoise import STEPS, Denoiser
from recipes.hunyuan_video.encode import encode
from recipes.hunyuan_video.options import Options
from recipes.hunyuan_video.spreading import Spread


def denoiser_of(
    components: Components,
    options: Options,
    shape: tuple[int, ...],
    *,
    calls: int = 1,
    way: Spread | None = None,
    encoded: Any = None,
) -> Denoiser:
    """What `generate.run_denoise` makes of a run.

    Args:
        components: a model folder.
        options: of the run.
        shape: of the latents.
        calls: of the network a step.
        way: to spread it.
        encoded: what `encode` gave for the options, if that is known.
    """
    ported: Any = components.ported("transformer", STEPS, None if way is None else way.shard)
    width = components.picture_width
    encoded = encode(components, options) if encoded is None else encoded
    rows = rows_of(encoded, shape, guidance=options.guidance, picture_width=width)
    return Denoiser(ported, rows, options.guidance, calls, way, options.step_cache)
