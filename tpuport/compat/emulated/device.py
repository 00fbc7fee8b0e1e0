"""The emulated accelerator that code for CUDA sees: CPU tensors whose storage carries a mark.

Eager PyTorch still runs on the CPU, where it is the reference of every port. Moves are CUDA's: a
copy when the device changes, the tensor itself when it does not.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch._ops import OpOverloadPacket
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._device import _device_constructors

from tpuport.compat.emulated.other_views import refused_write
from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.device_mark import (
    CUDA,
    MARK,
    is_accelerator,
    is_tagged,
    mark_of,
    shown_device,
    storage_of,
    tag,
)
from tpuport.foundation.interop.seen_device import set_seen_device, where_they_are
from tpuport.foundation.patching.shim import REPLACED
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import tensors_in

CPU = torch.device("cpu")


def set_default(device: Any, *, by_type: bool = False) -> None:
    """Set the default device of this thread, as `torch.set_default_device` does.

    Args:
        device: the device.
        by_type: whether a default tensor type names it, which `torch.Tensor(2)` follows, too.
    """
    _THREAD.default = None if device is None else torch.device(device)
    _THREAD.by_type = by_type


def default_device() -> torch.device | None:
    """Return the default device of this thread, None if none is set."""
    return getattr(_THREAD, "default", None)


def default_type_is_there() -> bool:
    """Return whether the default tensor type of this thread is one of `torch.cuda`."""
    return default_device() is not None and _THREAD.by_type


_THREAD = threading.local()
# The token under which what a default type changes is replaced.
BY_TYPE = object()

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_HANDLERS: dict[Any, Handler] = {}


def handles(*targets: Any) -> Callable[[Handler], Handler]:
    """Return a decorator that lets a function answer for torch functions while the mode is on."""

    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(targets, handler))
        return handler

    return register


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


# Rooms whose code computes with a tensor where it really is.
_OURS = tuple(f"tpuport.{room}" for room in ("foundation", "model", "ops", "tracing", "weights"))


def _asked_by_us() -> bool:
    """Return whether tpuport's own code reads an attribute: it needs the real device."""
    # Frame 3 reads the attribute: below it are the mode, its handler and this function.
    name = _asker(sys._getframe(3))
    return name.startswith(_OURS) and not name.startswith("tpuport.tracing.patches")


def _asker(frame: FrameType | None) -> str:
    """Return the module of the code that asked, which a running trace and other modes pass on.

    One of those modes is `with torch.device("cuda"):`.
    """
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__"
        or frame.f_globals.get("__name__") == "tpuport.tracing.session.modes"
    ):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


@handles(_getter("device"))
def _device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del kwargs
    if is_tagged(args[0]) and not _asked_by_us():
        return shown_device()
    return func(*args)


@handles(_getter("is_cuda"))
def _is_cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del kwargs
    there = is_tagged(args[0]) and not _asked_by_us()
    return shown_device().type == "cuda" if there else func(*args)


@handles(_getter("is_xla"))
def _is_xla(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del kwargs
    there = is_tagged(args[0]) and not _asked_by_us()
    return shown_device().type == "xla" if there else func(*args)


@handles(_getter("is_cpu"))
def _is_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del kwargs
    return False if is_tagged(args[0]) and not _asked_by_us() else func(*args)


@handles(torch.Tensor.get_device, torch.get_device)
def _get_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return 0 if is_tagged(args[0]) else func(*args, **kwargs)


@handles(_getter("grad"))
def _grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Gradients are made by C++, which does not go through here.
    del kwargs
    tensor, grad = args[0], func(*args)
    if grad is None or isinstance(tensor, TracedTensor):
        return grad
    if is_tagged(tensor):
        return tag(grad)
    if is_tagged(grad):
        tensor.grad = grad = beside(grad, tensor)
    return grad


def beside(grad: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a gradient where its tensor is: it may come from a copy on the other device."""
    if isinstance(grad, TracedTensor) or is_tagged(tensor) == is_tagged(grad):
        return grad
    return tag(grad) if is_tagged(tensor) else _moved(grad, False, {})


@handles(torch.Tensor.cuda)
def _cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func
    tensor, device = args[0], kwargs.get("device", args[1] if len(args) > 1 else None)
    if device is not None and not is_accelerator(device):
        msg = f"Tensor.cuda() got the device {device}, which is not an accelerator"
        raise UsageError(msg)
    options = {"memory_format": kwargs["memory_format"]} if kwargs.get("memory_format") else {}
    return _moved(tensor, True, options)


@handles(torch.Tensor.cpu)
def _cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], TracedTensor):
        return func(*args, **kwargs)
    return _moved(args[0], False, kwargs)


@handles(torch.Tensor.to)
def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, rest = args[0], list(args[1:])
    options = dict(kwargs)
    other = rest[0] if rest else options.get("other")
    if isinstance(other, torch.Tensor):
        where: Any = CUDA if is_tagged(other) else other.device
        rest[:1], options["dtype"] = [], other.dtype
        options.pop("other", None)
    elif rest and not isinstance(rest[0], (torch.dtype, type)):  # int stands for torch.int64
        where = rest.pop(0)
    else:
        where = options.pop("device", None)
    if where is None:
        return settled(func(*args, **kwargs), args, kwargs)
    on_accelerator = is_accelerator(where)
    if not on_accelerator and torch.device(where).type != "cpu":
        return func(tensor, where, *rest, **options)
    for name, value in zip(("dtype", "non_blocking", "copy"), rest, strict=False):
        options[name] = value
    options = {k: v for k, v in options.items() if v is not None}
    return _moved(tensor, on_accelerator, options)


def _moved(tensor: torch.Tensor, on_accelerator: bool, options: dict[str, Any]) -> torch.Tensor:
    """Return the tensor on the accelerator or the host: itself if nothing changes."""
    real = torch.Tensor.device.__get__(tensor)  # type: ignore[attr-defined]
    options.pop("non_blocking", None)
    if real.type not in ("cpu", "cuda", "jax"):
        return tensor.to(CPU, **options)
    if isinstance(tensor, TracedTensor):
        return tensor.to(**options) if options else tensor
    moves = is_tagged(tensor) is not on_accelerator
    if not moves and not options:
        return tensor
    made = tensor.to(CPU, **{**options, "copy": True} if moves else options)
    return tag(made) if on_accelerator else made


@handles(torch.Tensor.type)
def _type(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, wanted = args[0], kwargs.get("dtype", args[1] if len(args) > 1 else None)
    if wanted is None:
        name = func(tensor)
        there = f"torch.{shown_device().type}."
        return name.replace("torch.", there, 1) if is_tagged(tensor) else name
    if isinstance(wanted, type):  # torch.cuda.FloatTensor
        wanted = f"{wanted.__module__}.{wanted.__name__}"
    if isinstance(wanted, str):
        on_accelerator = wanted.startswith(("torch.cuda.", "torch.xla."))
        host_type = wanted.replace("torch.cuda.", "torch.", 1).replace("torch.xla.", "torch.", 1)
        dtype = torch.empty(0).type(host_type).dtype
        return _moved(tensor, on_accelerator, {} if dtype == tensor.dtype else {"dtype": dtype})
    return settled(func(*args, **kwargs), args, kwargs)


@handles(torch.Tensor.type_as)
def _type_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func
    tensor, other = (*args, *kwargs.values())
    options = {} if other.dtype == tensor.dtype else {"dtype": other.dtype}
    return _moved(tensor, is_tagged(other), options)


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a torch function writes to its first argument (or to `out`)."""
    known = _WRITES.get(func)
    if known is None:
        name = getattr(func, "__name__", "")
        inplace = name.endswith("_") and not name.endswith("__")
        known = _WRITES[func] = inplace or name in _WRITING or func in _HANDING_OUT
    return known or "out" in kwargs or bool(kwargs.get("inplace"))


_WRITES: dict[Any, bool] = {}
_WRITING = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"),
    *("__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
}
# Writes through the memory that these hand out cannot be noticed.
_HANDING_OUT = {torch.Tensor.__dlpack__, torch.Tensor.data_ptr, torch.Tensor.share_memory_}


def _note_write(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count a write, even one that torch's version counter misses (`p.data.add_()`)."""
    for tensor in tensors_in((*args[:1], kwargs.get("out"))):
        mark = None if isinstance(tensor, TracedTensor) else mark_of(tensor)
        if mark is not None:
            if mark.unshared is not None and not _asked_by_us():
                raise refused_write(mark.unshared)
            mark.writes += 1


@handles(torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence)
def _packed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(arg, TracedTensor) for arg in args):
        raise port_error(
            "a packed sequence has sizes that depend on data",
            code="TPU203",
            remedy="give the recurrent layer the padded batch, and mask what it returns",
        )
    # Lengths stay on the host, as on CUDA.
    data, lengths = func(*args, **kwargs)
    return settled(data, args, kwargs), lengths


@handles(torch.Tensor.untyped_storage)
def _storage(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    storage = func(*args, **kwargs)
    if hasattr(storage, MARK) and not _asker(sys._getframe(2)).startswith("tpuport."):
        # A script may write to the storage itself, which cannot be noticed.
        getattr(storage, MARK).writes += 1
    return storage


@handles(torch.Tensor.numpy, torch.Tensor.__array__)
def _numpy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], TracedTensor) and is_tagged(args[0]) and not _asked_by_us():
        # CUDA refuses too; and writes through the array could not be noticed.
        msg = (
            f"can't convert {shown_device()} device type tensor to numpy."
            " Use Tensor.cpu() to copy the tensor to host memory first."
        )
        raise TypeError(msg)
    return func(*args, **kwargs)


# They return values or facts that have no device; `_parse_to` reads the arguments of
# `Module.to`, which then asks each tensor to move.
_LEAVE = {
    torch._C._nn._parse_to,  # pyright: ignore[reportAttributeAccessIssue]  (not in the stubs)
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.stride,
    *(_getter(name) for name in ("shape", "dtype", "ndim", "requires_grad", "is_leaf", "grad_fn")),
}


class Emulated(TorchFunctionMode):
    """The mode that answers torch functions that ask for, or make tensors on, the device "cuda"."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            rest = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            return self.__torch_function__(func, types, args, rest).pin_memory()
        if func in _LEAVE:
            return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if _writes(func, kwargs):
            _note_write(args, kwargs)
        if "device" in kwargs:
            if is_accelerator(kwargs["device"]):
                return _made_there(func(*args, **{**kwargs, "device": CPU}), args)
            if kwargs["device"] is not None:
                return func(*args, **kwargs)
        default = default_device()
        if default is not None and func in _device_constructors():
            return self.__torch_function__(func, types, args, {**kwargs, "device": default})
        if getattr(func, "__module__", None) in _WRITTEN_IN_PYTHON or _is_of_a_package(func):
            with where_they_are():
                return settled(func(*args, **kwargs), args, kwargs)
        return settled(func(*args, **kwargs), args, kwargs)


# What these call inside reaches no mode, such as `torch.zeros(2, device=k.device)`.
_WRITTEN_IN_PYTHON = frozenset({"torch.functional", "torch.nn.functional"})


def _is_of_a_package(func: Any) -> bool:
    """Return whether a function is an operator that a package has given torch, maybe in Python."""
    packet = getattr(func, "_overloadpacket", func)
    if not isinstance(packet, OpOverloadPacket):
        return False
    return packet._qualified_op_name.partition("::")[0] not in ("aten", "prims")


def _made_there(result: Any, args: tuple[Any, ...]) -> Any:
    """Tag a tensor made for the accelerator; copy it first if it shares host memory."""
    if not isinstance(result, torch.Tensor) or isinstance(result, TracedTensor):
        return result
    if is_tagged(result):
        return result
    shares = any(_shares(result, arg) for arg in tensors_in(args)) or _is_foreign(result, args)
    return tag(result.clone() if shares else result)


def _is_foreign(result: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Return whether a result may share another library's memory (`torch.as_tensor(array)`)."""
    storage = storage_of(result)  # a sparse tensor has none
    return storage is not None and not storage.resizable() and bool(args)


def _shares(result: torch.Tensor, arg: Any) -> bool:
    ours, theirs = storage_of(result), storage_of(arg)
    return ours is not None and theirs is not None and ours._cdata == theirs._cdata


def settled(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tag the results of an operation on tagged tensors, except for views of host tensors."""
    if isinstance(result, torch.Tensor):
        results: Any = (result,)
    elif isinstance(result, (tuple, list)):
        results = tuple(item for item in result if isinstance(item, torch.Tensor))
    else:
        return result
    fresh = [one for one in results if not is_tagged(one)]
    if not fresh:
        return result
    given = [*tensors_in(args), *tensors_in(kwargs.values())]
    if not any(is_tagged(one) for one in given):
        return result
    host = [storage_of(one) for one in given if not is_tagged(one)]
    known = {storage._cdata for storage in host if storage is not None}
    for one in fresh:
        storage = storage_of(one)
        if storage is not None and storage._cdata not in known:
            tag(one)
    return result


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Emulate the device in this thread; nested blocks share one mode."""
    depth = getattr(_THREAD, "depth", 0)
    if depth == 0:
        _THREAD.mode = Emulated()
        _push_mode(_THREAD.mode)
        set_seen_device(shown_device())
    _THREAD.depth = depth + 1
    try:
        yield
    finally:
        _THREAD.depth -= 1
        if _THREAD.depth == 0:
            if default_type_is_there():
                REPLACED.remove(BY_TYPE)
            set_default(None)
            set_seen_device(None)
            _take_out(_THREAD.mode)
            _THREAD.mode = None


@contextlib.contextmanager
def resumed() -> Iterator[None]:
    """Emulate the device again where torch took the modes of this thread away (in a backward
    pass, inside a torch function).
    """
    mode = getattr(_THREAD, "mode", None)
    if mode is None or any(one is mode for one in _get_current_function_mode_stack()):
        yield
        return
    _push_mode(mode)
    try:
        yield
    finally:
        _take_out(mode)


def _take_out(mode: Emulated) -> None:
    """Take a mode off the stack of modes, even from below others that were left there."""
    above = []
    while _len_torch_function_stack():
        top = _pop_mode()
        if top is mode:
            break
        above.append(top)
    for one in reversed(above):
        _push_mode(one)
