"""Kernels for operations that torch has for one dtype only, where two dtypes of a policy meet.

Under a policy float32 and the compute dtype meet where plain PyTorch raises: a float32 input of a
bfloat16 layer, a bfloat16 input of a layer kept in float32. CUDA's autocast would cast, and so do
these kernels. A policy lets them choose better: a layer computes in the dtype of its weight, other
products in the compute dtype. Products of float32 with float32 are not cast (autocast would cast
them: rotary angles, router scores). Norms compute in float32 and return their input's dtype. Losses
are computed and returned in float32, as under CUDA's autocast.

torch calls the kernels above autograd, inside composite operations too, in eager mode and in a
trace. They are registered for a dispatch key whose backend torch no longer ships, so nothing calls
them outside of `in_force`.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tpuport.tracing.core.autocast import LOSSES
from tpuport.tracing.core.values import map_tensors, tensors_in

_BACKEND = "AutocastIPU"
_KEY: Any = torch._C._parse_dispatch_key(_BACKEND)
_KEYS = torch._C.DispatchKeySet(_KEY)

# Operations whose first three arguments are an input, a weight and a bias.
_LAYERS = (
    *("linear", "conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding"),
    *("conv3d.padding", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
    *("_convolution", "convolution", "prelu"),
)
_PRODUCTS = (
    *("matmul", "mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "addr", "addbmm", "baddbmm"),
    *("einsum", "chain_matmul", "linalg_multi_dot", "linalg_vecdot", "tensordot", "bilinear"),
    "scaled_dot_product_attention",
)
_RECURRENT = tuple(
    f"{layer}.{overload}"
    for layer in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload in ("input", "data")
)
_NORMS = ("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "native_group_norm")
# Losses, and ops that compute a part of one, that are not in autocast's list.
_ALSO_LOSSES = ("log_softmax.int", "logsumexp", "binary_cross_entropy", "ctc_loss.Tensor")


class _Local(threading.local):
    dtype: torch.dtype | None = None


_LOCAL = _Local()
_LOCK = threading.Lock()
_LIBRARIES: list[Any] = []


@contextlib.contextmanager
def in_force(dtype: torch.dtype) -> Iterator[None]:
    """Allow float32 and `dtype` to meet in this thread, inside the block."""
    _register()
    before, _LOCAL.dtype = _LOCAL.dtype, dtype
    if before is None:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
    try:
        yield
    finally:
        _LOCAL.dtype = before
        if before is None:
            torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)
            torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, True)


# -- which dtype -----------------------------------------------------------------------------------


def layer(operands: Sequence[Any]) -> list[Any]:
    """Return a layer's input, weight and bias in the weight's dtype, if a policy lets them meet."""
    return _cast(operands, operands[1].dtype) if _meet(operands) else list(operands)


def product(operands: Sequence[Any]) -> list[Any]:
    """Return the operands of a product in one dtype, if a policy lets them meet.

    It is the dtype of a parameter among them, else the compute dtype.
    """
    if not _meet(operands):
        return list(operands)
    weights = (o.dtype for o in tensors_in(operands) if isinstance(o, torch.nn.Parameter))
    return _cast(operands, next(weights, _LOCAL.dtype))


def attention(q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
    """Return the operands of attention in the dtype of a product, an additive mask included."""
    if _LOCAL.dtype is None:
        return q, k, v, mask
    q, k, v = product([q, k, v])
    if _meet([q, mask]):
        mask = mask.to(q.dtype)
    return q, k, v, mask


def _meet(operands: Sequence[Any]) -> bool:
    """Return whether the floating operands are of float32 and of the compute dtype."""
    if _LOCAL.dtype is None:
        return False
    found = {o.dtype for o in tensors_in(operands) if o.dtype.is_floating_point}
    return found == {torch.float32, _LOCAL.dtype} and len(found) == 2


def _cast(operands: Sequence[Any], dtype: torch.dtype | None) -> list[Any]:
    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
        return value.to(dtype) if floating else value

    return map_tensors(cast, list(operands))


# -- kernels ---------------------------------------------------------------------------------------


def _run_layer(op: Any, args: Any, kwargs: Any) -> Any:
    return op(*layer(args[:3]), *args[3:], **kwargs)


def _run_product(op: Any, args: Any, kwargs: Any) -> Any:
    return op(*product(args), **kwargs)


def _run_attention(op: Any, q: Any, k: Any, v: Any, mask: Any = None, *args: Any, **kw: Any) -> Any:
    return op(*attention(q, k, v, mask), *args, **kw)


def _run_norm(op: Any, args: Any, kwargs: Any) -> Any:
    if not _meet([*args, *kwargs.values()]):
        return op(*args, **kwargs)
    names, values = list(kwargs), _cast([*args, *kwargs.values()], torch.float32)
    wide = dict(zip(names, values[len(args) :], strict=True))
    result = op(*values[: len(args)], **wide)
    if isinstance(result, tuple):
        return result[0].to(args[0].dtype), *result[1:]
    return result.to(args[0].dtype)


def _run_loss(op: Any, args: Any, kwargs: Any) -> Any:
    if any(t.dtype == _LOCAL.dtype for t in tensors_in([*args, *kwargs.values()])):
        args = _cast(args, torch.float32)
        kwargs = dict(zip(kwargs, _cast([*kwargs.values()], torch.float32), strict=True))
    return op(*args, **kwargs)


def _kernel(op: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        # Without the guard the op would dispatch to this kernel again.
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return run(op, args, kwargs)

    return kernel


def _register() -> None:
    """Register the kernels with torch, once in a process."""
    with _LOCK:
        if _LIBRARIES:
            return
        table = {
            _run_layer: _LAYERS,
            _run_product: (*_PRODUCTS, *_RECURRENT),
            _run_norm: _NORMS,
            _run_loss: (*LOSSES, *_ALSO_LOSSES),
        }
        ours = torch.library.Library("aten", "IMPL", _BACKEND)
        rest = torch.library.Library("_", "IMPL", _BACKEND)
        # Ops without a kernel here pass on to the next dispatch key.
        rest.fallback(torch.library.fallthrough_kernel)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for run, names in table.items():
                for name in names:
                    packet, _, overload = name.partition(".")
                    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                    attends = packet == "scaled_dot_product_attention"
                    ours.impl(name, _kernel(op, _attend if attends else run))
        _LIBRARIES.extend([ours, rest])


def _attend(op: Any, args: Any, kwargs: Any) -> Any:
    return _run_attention(op, *args, **kwargs)
