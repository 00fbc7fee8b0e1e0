"""Decoding of latents and encoding of an image by the VAE's own class, in one program each."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tpuport
from recipes.hunyuan_video.components import Components
from recipes.hunyuan_video.tiling import Tiling, map_tiles, tiling_of
from recipes.hunyuan_video.vae_patches import only_part, patched_vae
from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel

PRECISIONS = ("bf16", "float32")
PIXELS = 3
# A weight of each half in both classes. Its dtype is that of the model.
_FIRST = "decoder.conv_in.conv.weight", "encoder.conv_in.conv.weight"


def decode_tile(
    vae: Any, latents: torch.Tensor, extents: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the VAE's own decoder: (B, C, T, h, w) -> (B, 3, F, H, W); see `only_part`."""
    with only_part(extents, latents.shape[-2:]):
        return vae.decoder(latents)


def encode_tile(vae: Any, video: torch.Tensor, extents: torch.Tensor | None = None) -> torch.Tensor:
    """Run the VAE's own encoder: (B, 3, F, H, W) -> means and log variances (B, 2 C, T, h, w)."""
    with only_part(extents, video.shape[-2:]):
        return vae.encoder(video)


class VideoVae:
    """A ported VAE with its two programs, made by `port_vae`.

    Attributes:
        ported: The port that `tpuport.convert` made. Weights can be loaded into it.
    """

    def __init__(self, ported: PortedModel) -> None:
        self.ported = ported
        self.decode = jax.jit(partial(decode_latents, ported), static_argnames="tiling")
        self.encode = jax.jit(partial(encode_frame, ported), static_argnames="tiling")


def port_vae(model: torch.nn.Module, precision: str = "bf16", mesh: Mesh | None = None) -> VideoVae:
    """Port a VAE of HunyuanVideo-1.5 without changing it. It may be on the meta device.

    Args:
        model: diffusers' AutoencoderKLHunyuanVideo15 or upstream's AutoencoderKLConv3D. Its own
            tile sizes are used (`model.enable_tiling(...)`).
        precision: "bf16" for weights and activations, with norms in float32; or "float32".
        mesh: Tiles are sharded over its data axes, weights are replicated. None for one device.

    Raises:
        UsageError: There is no such precision, or the model is of another class.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision={precision!r}: expected one of {', '.join(PRECISIONS)}")
    with patched_vae(model):
        ported = tpuport.convert(model, methods=(decode_tile, encode_tile))
    if precision == "bf16":
        tpuport.cast(ported, tpuport.DtypePolicy(outputs="computed"))
    if mesh is not None:
        tpuport.shard(ported, mesh, "replicated")
    return VideoVae(ported)


def load_vae(
    components: Components, half: Literal["encoder", "decoder"], mesh: Mesh | None = None
) -> VideoVae:
    """Port half of a folder's VAE and read its weights, so that a run reads each of them once.

    Args:
        components: The model folder.
        half: Its half, for `encode_image` or for `decode_video`.
        mesh: See `port_vae`.

    Raises:
        UsageError: The folder has no VAE.
        CheckpointError: Its weights are damaged.
    """
    model = components.module("vae", torch.float32)
    setattr(model, "decoder" if half == "encoder" else "encoder", None)
    vae = port_vae(model, components.precision, mesh)
    components.load(vae.ported, "vae", half)
    return vae


def decode_video(vae: VideoVae, latents: Any, tiling: Tiling | None = None) -> jax.Array:
    """Decode latents tile by tile, as the class's `decode` does with tiling enabled.

    Args:
        vae: Result of `port_vae`.
        latents: (B, C, T, h, w) as the transformer returns them, in any floating dtype. They are
            divided by the scaling factor here.
        tiling: Replaces the model's tiles. Latents that fit in one tile are decoded in one call.

    Returns:
        (B, 3, 4 (T - 1) + 1, 16 h, 16 w), about -1 to 1, in the dtype of the weights; replicated on
        a mesh.

    Raises:
        UsageError: The latents are not of that shape.
    """
    ported = vae.ported
    _check("latents", latents, ("batch", "channels", "frames", "height", "width"))
    channels = config_of(ported).latent_channels
    if latents.shape[1] != channels:
        raise UsageError(
            f"latents: expected {channels} channels, those of the VAE, got {latents.shape[1]} in"
            f" shape {tuple(latents.shape)}. What to do: give what the transformer returns, without"
            " the conditions that are concatenated to its input"
        )
    with patched_vae(ported.module):
        return vae.decode(*_state(ported), None, _on_mesh(ported, latents), tiling=tiling)


def encode_image(vae: VideoVae, image: Any, tiling: Tiling | None = None) -> jax.Array:
    """Encode an image as the first frame's condition of image-to-video.

    Args:
        vae: Result of `port_vae`.
        image: (B, 3, H, W) from -1 to 1; height and width are multiples of 16.
        tiling: `tiling_of(model, "encode")` for an image that is too large. None encodes it in one
            call, as the class does unless tiling is enabled.

    Returns:
        (B, C, 1, H / 16, W / 16), the mode of the posterior times the scaling factor, in the dtype
        of the weights.

    Raises:
        UsageError: The image is not of that shape.
    """
    ported = vae.ported
    _check("image", image, ("batch", "channels", "height", "width"))
    _, factor = factors(ported.module)
    if image.shape[1] != PIXELS or image.shape[2] % factor or image.shape[3] % factor:
        raise UsageError(
            f"image: expected {PIXELS} channels, and height and width that are multiples of"
            f" {factor}, got shape {tuple(image.shape)}. What to do: resize and crop it to the size"
            " of the video"
        )
    with patched_vae(ported.module):
        return vae.encode(*_state(ported), None, _on_mesh(ported, image), tiling=tiling)


def decode_latents(
    ported: PortedModel,
    params: Any,
    buffers: Any,
    key: Any,
    latents: jax.Array,
    tiling: Tiling | None = None,
) -> jax.Array:
    """Compute `decode_video` as a pure function of the state, traced inside `patched_vae`."""
    latents = latents.astype(_dtype(params, buffers)) / config_of(ported).scaling_factor

    def decode(*tiles: Any) -> jax.Array:
        with tpuport.attention_options("blockwise"):
            return ported.apply(params, buffers, key, *tiles, method=decode_tile.__name__)[0]

    return map_tiles(decode, latents, tiling or tiling_of(ported.module), ported.mesh)


def encode_frame(
    ported: PortedModel,
    params: Any,
    buffers: Any,
    key: Any,
    image: jax.Array,
    tiling: Tiling | None = None,
) -> jax.Array:
    """Compute `encode_image` as a pure function of the state, traced inside `patched_vae`."""
    dtype = _dtype(params, buffers)
    frame = image.astype(dtype)[:, :, None]

    def encode(*tiles: Any) -> jax.Array:
        # One frame has no mask, but for splash heads of 1024 in float32 are too large.
        with tpuport.attention_options("blockwise" if dtype == jnp.float32 else "auto"):
            return ported.apply(params, buffers, key, *tiles, method=encode_tile.__name__)[0]

    if tiling is None:
        moments = encode(frame)
    else:
        moments = map_tiles(encode, frame, tiling, ported.mesh)
    mode, _ = jnp.split(moments, 2, axis=1)
    return mode * config_of(ported).scaling_factor


def factors(model: Any) -> tuple[int, int]:
    """Return the frames per latent (the first has one), and the pixels per latent side."""
    config = model.config
    if "ffactor_spatial" in config:
        return config.ffactor_temporal, config.ffactor_spatial
    return config.temporal_compression_ratio, config.spatial_compression_ratio


def config_of(vae: PortedModel) -> Any:
    """Return the configuration of the ported class."""
    model: Any = vae.module
    return model.config


def _check(name: str, array: Any, dims: tuple[str, ...]) -> None:
    shape = tuple(getattr(array, "shape", ()))
    if len(shape) != len(dims) or 0 in shape:
        raise UsageError(
            f"{name}: expected an array of {len(dims)} dims ({', '.join(dims)}), none of them of"
            f" size 0, got a {type(array).__name__} of shape {shape}"
        )


def _state(ported: PortedModel) -> tuple[Any, Any]:
    return ported.params, ported.buffers


def _dtype(params: Any, buffers: Any) -> Any:
    state = {**params, **buffers}
    return next(state[name].dtype for name in _FIRST if name in state)


def _on_mesh(ported: PortedModel, value: Any) -> jax.Array:
    """Return the value replicated on every chip."""
    value = jnp.asarray(value)
    if ported.mesh is None:
        return value
    return jax.device_put(value, NamedSharding(ported.mesh, P()))
