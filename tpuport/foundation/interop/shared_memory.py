"""Weights that torch and jax read in the same memory; torch copies it before it writes.

torch keeps who shares the memory of a tensor that was cloned lazily, and whichever tensor is
written first, in whatever way torch offers (in place, `data`, numpy, DLPack, its storage), gets
memory of its own. jax never writes the memory of an array that it does not own, donated or not.
What torch does not see is an address that somebody took before: a tensor whose memory is also a
numpy array's, or was exported, is copied.
"""

import ctypes
import weakref

import jax
import jax.core
import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tpuport.foundation.interop import backend

# Smaller tensors are copied as fast.
_LEAST = 1 << 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64}
# By the id of a living array, the tensor whose memory it reads.
_LENT: dict[int, torch.Tensor] = {}


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Return an array of jax with the values that a tensor has now.

    Where jax's device is the CPU, it shares the memory of a large tensor until that is written.

    Raises:
        OverflowError: as `backend.to_jax`.
    """
    if not _suits(tensor) or jax.default_backend() != "cpu":
        return backend.to_jax(tensor)
    lent = lazy_clone(tensor)
    if not lent.is_contiguous():
        lent = lent.contiguous()
    array = jax.device_put(_memory(lent), may_alias=True)
    if not isinstance(array, jax.core.Tracer) and all(d.platform == "cpu" for d in array.devices()):
        if array.is_fully_addressable and address(lent) == array.unsafe_buffer_pointer():
            _LENT[id(array)] = lent
            weakref.finalize(array, _LENT.pop, id(array)).atexit = False
    return array


def is_unwritten(tensor: torch.Tensor, array: jax.Array, version: int | None) -> bool:
    """Return whether a tensor is known to have the values that `to_jax` made an array of.

    It is where they share memory. Of a large array on an accelerator, which takes time to read, the
    tensor's version tells, which a write by `.data` leaves as it is.

    Args:
        tensor: the tensor.
        array: what `to_jax` returned.
        version: the tensor's version then, None if it has none.
    """
    lent = _LENT.get(id(array))
    if lent is not None:
        return tensor.is_contiguous() and address(tensor) == address(lent)
    is_near = tensor.nbytes < _LEAST or all(d.platform == "cpu" for d in array.devices())
    if is_near or version is None or tensor.is_inference():
        return False
    return tensor._version == version


def _suits(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is large, and its memory holds what jax's array would."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype not in _DTYPES:
        return False
    return tensor.layout is torch.strided and not tensor.is_neg() and tensor.nbytes >= _LEAST


def to_torch(value: jax.Array, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a CPU tensor with the values of an array, cast to `dtype` if given.

    It shares the memory of an array that `to_jax` made, until the tensor is written.
    """
    lent = _LENT.get(id(value))
    if lent is None:
        return backend.to_torch(value, dtype)
    return lazy_clone(lent).to(lent.dtype if dtype is None else dtype)


def unnarrowed(made: torch.Tensor, value: jax.Array, original: torch.Tensor) -> torch.Tensor:
    """Return a copy of a float64 tensor if jax holds it in 32 bits and nothing has changed it.

    Args:
        made: what `to_torch` gives for the array, in the dtype of the tensor.
        value: the array.
        original: the tensor that the array was made of at first.
    """
    narrow = _NARROW.get(original.dtype)
    if narrow is None or made.dtype != original.dtype or original.is_meta:
        return made
    if backend.torch_dtype(value.dtype) != narrow:
        return made
    held = original.detach().to("cpu", narrow).to(made.dtype)
    if held.shape != made.shape or not torch.allclose(held, made, rtol=0, atol=0, equal_nan=True):
        return made
    return original.detach().to("cpu", copy=True)


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor that shares its memory until either is written, if it can."""
    made = try_lazy_clone(tensor) if is_private(tensor) else None
    if made is not None:
        return made
    # A class of the user's may have methods of these names.
    with torch._C.DisableTorchFunction():
        return torch.Tensor.clone(torch.Tensor.detach(tensor))


def computed(leaf: torch.Tensor) -> torch.Tensor:
    """Return a tensor equal to a leaf that requires grad, which may be written in place.

    Eager PyTorch refuses that of a leaf, and of a view of one.
    """
    with torch.enable_grad(), torch._C.DisableTorchFunction():
        return torch.Tensor.clone(leaf)


def try_lazy_clone(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return torch's lazy clone of a tensor, or None where its memory cannot be shared so.

    The storage of a tensor of `torch.load` has no allocator, which the first write to the tensor or
    to its lazy clone asks for the copy: the process would end there. A storage that can be resized
    is known to have one, and so have those of lazy clones that were made here and their originals.
    """
    storage = tensor.untyped_storage()
    if not (storage.resizable() or _is_clone(storage)):
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        try:
            made = torch._lazy_clone(torch.Tensor.detach(tensor))  # pyright: ignore[reportPrivateImportUsage]
        except RuntimeError:  # memory that torch did not allocate: a file's, shared, numpy's
            return None
    for shared in (storage, made.untyped_storage()):
        _note_clone(shared)
    return made


# Storages that were shared so, by address. They cannot be resized any more.
_CLONES: dict[int, StorageWeakRef] = {}
_MOST = 1024


def _note_clone(storage: torch.UntypedStorage) -> None:
    if len(_CLONES) > _MOST:
        for known in [a for a, one in _CLONES.items() if one.expired()]:
            del _CLONES[known]
    _CLONES[storage._cdata] = StorageWeakRef(storage)


def _is_clone(storage: torch.UntypedStorage) -> bool:
    known = _CLONES.get(storage._cdata)
    return known is not None and not known.expired()


def is_private(tensor: torch.Tensor) -> bool:
    """Return whether no array, exported memory or other tensor refers to a tensor's memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return False
    if tensor.layout is not torch.strided or tensor.is_inference():
        return False
    # A storage is held by its tensor and by the Python object that is asked for here.
    held = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # pyright: ignore[reportAttributeAccessIssue]
    return held == 2 and tensor._use_count() == 1  # pyright: ignore[reportAttributeAccessIssue]


def _memory(tensor: torch.Tensor) -> np.ndarray:
    """Return an array over the memory of a tensor, which it keeps alive, without a copy of it."""
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(address(tensor))
    memory.owner = tensor  # pyright: ignore[reportAttributeAccessIssue]
    array = np.asarray(memory).view(backend.jax_dtype(tensor.dtype)).reshape(tensor.shape)
    array.flags.writeable = False
    return array


def address(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor is, which goes on being shared."""
    # `Tensor.data_ptr` is for those who may write: it ends the sharing.
    return torch._C._data_address(tensor)  # pyright: ignore[reportAttributeAccessIssue]
