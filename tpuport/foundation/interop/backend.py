"""The one place that imports torchax, and the conversions between torch and jax values.

Importing torchax sets an environment variable, turns off a torch fast path and announces an
available accelerator "jax" that torch is not linked with, after which `torch.compile`, flex
attention, loaders that pin memory, `fork_rng`, FSDP and `barrier` fail everywhere in the process.
All three are put back here, so importing tpuport's model layer leaves the process as it was.
(torchax 0.0.14.dev20261026; can go when torchax imports cleanly.)
"""

import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.foundation.interop.platforms import leave_out_libtpu


def _import_torchax() -> None:
    variable = "ENABLE_RUNTIME_UPTIME_TELEMETRY"
    before = os.environ.get(variable)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    accelerator = torch._C._accelerator_getAccelerator()
    if "torchax" not in sys.modules:
        import torchax.device_module

        torchax.device_module.is_available = lambda: False
        torchax.device_module.device_count = lambda: 0
        _announce_no_accelerator(accelerator)
    torch.backends.mha.set_fastpath_enabled(fastpath)
    if before is None:
        os.environ.pop(variable, None)


def _announce_no_accelerator(before: torch.device | None) -> None:
    """Make torch find the accelerator that it found before torchax's was announced, if any."""

    registry: Any = vars(torch._C)["_acc"]

    class Hooks(registry.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return False

        def is_built(self) -> bool:
            return False

        def has_primary_context(self, device_index: int) -> bool:
            return False

    registry.register_python_privateuseone_hook(Hooks())
    announced = torch._C._accelerator_getAccelerator

    def found() -> torch.device | None:
        return announced() if sys.modules["torchax"].device_module.is_available() else before

    torch._C._accelerator_getAccelerator = found
    torch._C._get_accelerator = lambda: found() or torch.device("cpu")


leave_out_libtpu()
_import_torchax()

from torchax.ops import jaten, ops_registry  # noqa: E402
from torchax.ops import mappings as _mappings  # noqa: E402
from torchax.tensor import Tensor as TorchaxTensor  # noqa: E402  (others take it from here)

from tpuport.foundation.errors import UsageError  # noqa: E402

TORCHAX_OPS: dict[Any, Any] = ops_registry.all_aten_ops
torchax_lowerings = jaten

_NO_NUMPY = {
    torch.bfloat16: (torch.int16, jnp.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, jnp.float8_e4m3fn),
    torch.float8_e4m3fnuz: (torch.uint8, jnp.float8_e4m3fnuz),
    torch.float8_e5m2: (torch.uint8, jnp.float8_e5m2),
    torch.float8_e5m2fnuz: (torch.uint8, jnp.float8_e5m2fnuz),
}
_NO_NUMPY_JAX = {
    np.dtype(jax_dtype): (bits, torch_dtype) for torch_dtype, (bits, jax_dtype) in _NO_NUMPY.items()
}


def is_traced(value: Any) -> bool:
    """Return whether a value is a tensor of tpuport's traces, or the result of one."""
    return isinstance(value, TorchaxTensor) and getattr(type(value), "is_traced", False)


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype of a jax dtype."""
    return _mappings.j2t_dtype(np.dtype(dtype))


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the jax dtype that holds a torch dtype.

    64-bit types are held in 32 bits unless jax_enable_x64 is on.

    Raises:
        UsageError: there is none.
    """
    try:
        return jax.dtypes.canonicalize_dtype(_mappings.t2j_dtype(dtype))
    except RuntimeError as error:
        msg = f"JAX has no {str(dtype).removeprefix('torch.')}: compute in another dtype"
        raise UsageError(msg) from error


def to_numpy_array(tensor: torch.Tensor) -> np.ndarray:
    """Convert a CPU torch tensor to a numpy array of the same dtype, without rounding.

    A dtype that numpy lacks becomes the one of ml_dtypes.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor._is_zerotensor():  # a tangent that autograd knows to be zero has no memory
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype in _NO_NUMPY:
        bits, dtype = _NO_NUMPY[tensor.dtype]
        return tensor.contiguous().view(bits).numpy().view(np.dtype(dtype))
    return tensor.numpy()


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Copy a CPU torch tensor into a jax array.

    64-bit types are narrowed to what jax is configured to hold.

    Raises:
        OverflowError: an int64 value does not fit in the 32 bits that jax holds without x64.
    """
    return jax.device_put(to_host_array(tensor))


def to_host_array(tensor: torch.Tensor) -> np.ndarray:
    """Copy a CPU torch tensor into a numpy array of the dtype that jax has for it.

    Raises:
        OverflowError: an int64 value does not fit in the 32 bits that jax holds without x64.
    """
    array = to_numpy_array(tensor)
    target = jax_dtype(tensor.dtype)
    check_fits(array, target)
    # A copy: jax may alias a numpy buffer that torch later writes to. numpy makes it, because XLA
    # would compile a program for each shape.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array(array, dtype=target)


def fits(tensor: torch.Tensor) -> bool:
    """Return whether jax holds the integers of a CPU tensor without loss."""
    if not tensor.numel() or jax_dtype(tensor.dtype).itemsize == tensor.itemsize:
        return True
    low, high = (int(bound) for bound in torch.aminmax(tensor.detach()))
    info = np.iinfo(jax_dtype(tensor.dtype))
    return info.min <= low and high <= info.max


def check_fits(array: np.ndarray, target: np.dtype) -> None:
    """Refuse to narrow integers that would wrap.

    Raises:
        OverflowError: a value does not fit in `target`.
    """
    if array.dtype == target or array.dtype.kind not in "iu" or not array.size:
        return
    info = np.iinfo(target)
    if array.min() < info.min or array.max() > info.max:
        msg = (
            f"an {torch_dtype(array.dtype)} value (between {array.min()} and {array.max()}) does"
            f" not fit in {target}, which jax"
            " holds it in; enable 64-bit values with jax.config.update('jax_enable_x64',"
            " True) before converting"
        )
        raise OverflowError(msg)


def to_torch(value: jax.Array, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy a concrete jax array into a plain CPU torch tensor, cast to `dtype` if given."""
    array = np.asarray(value)
    if array.dtype in _NO_NUMPY_JAX:
        bits, held = _NO_NUMPY_JAX[array.dtype]
        raw = array.view(np.int16 if bits is torch.int16 else np.uint8)
        result = torch.from_numpy(np.array(raw, copy=True)).view(held)
    else:
        result = torch.from_numpy(np.array(array, copy=True))
    return result if dtype is None else result.to(dtype)


def key_of(seed: int) -> jax.Array:
    """Return a random key made of all bits of a 64-bit seed.

    `jax.random.key` alone keeps 32 bits of it where 64-bit types are off.
    """
    return jax.random.fold_in(jax.random.key(seed & 0xFFFFFFFF), seed >> 32)
