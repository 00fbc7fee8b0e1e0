"""CUDA's autocast on the emulated device: which operation runs in which dtype.

torch registers CUDA's casts for the dispatch key `AutocastCUDA`, also in builds without CUDA, but
they cast only tensors that really are on a GPU. Here kernels of our own take their place, for
tensors that count as being on the accelerator, and the key is asked of every operation while
`torch.autocast("cuda")` is on. So the casts happen exactly where torch has them: above autograd
(gradients are cast back) and inside composite operations too; eager tensors and traced ones alike.

The lists are those of torch 2.13, `AT_FORALL_*` in ATen/autocast_mode.h, which its documentation
publishes as "CUDA Op-Specific Behavior".
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tpuport.compat.emulated.device import is_tagged
from tpuport.compat.emulated.settings import active
from tpuport.foundation.errors import UsageError
from tpuport.tracing.core.autocast import CUDA_KEY, LOSSES
from tpuport.tracing.core.values import tensors_in

LOWER_PRECISION = (
    *("_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc"),
    *("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution"),
    *("prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot"),
    *("linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot"),
    *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell"),
    *("rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention"),
    "scaled_dot_product_attention",
)
# On CUDA cuDNN runs a recurrent layer as one operation, and `_cudnn_rnn` has casts of its own
# (aten/src/ATen/cudnn/AutocastRNN.cpp): input, states and weights to the lower precision.
RECURRENT = tuple(
    f"{layer}.{overload}"
    for layer in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload in ("input", "data")
)
FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
    *("reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor"),
    *("pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm"),
    *("frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity"),
    *LOSSES,
    *("dist", "pdist", "cdist", "renorm", "logsumexp"),
    *("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d"),
    *("_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa"),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
# They run in float32 by way of their `dtype` argument, unless the caller gave one.
FLOAT32_RESULT = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
    *("sum", "sum.dim_IntList"),
)
# `norm` has no such argument, but another overload of it does.
NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
WIDEST = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler"),
    *("index_put", "tensordot", "scatter_add"),
)
BANNED = ("binary_cross_entropy",)

OPTION = "autocast_float16"


def low_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to use for the one asked for: bfloat16 for float16 unless the option is set.

    TPUs multiply bfloat16, not float16. It has float32's range, so a loss scale is not needed but
    does no harm, and 8 bits of precision where float16 has 11.

    Raises:
        UsageError: the option is neither "bfloat16" nor "float16".
    """
    settings = active()
    if dtype != torch.float16 or settings is None:
        return dtype
    chosen = settings.options.get(OPTION, "bfloat16")
    if chosen not in ("bfloat16", "float16"):
        msg = f'{OPTION} must be "bfloat16" or "float16", got {chosen!r}'
        raise UsageError(msg)
    return getattr(torch, chosen)


# -- casting ---------------------------------------------------------------------------------------


def _floating(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.dtype != torch.float64
    )


def _is_there(values: Any) -> bool:
    """Return whether an operation runs on the accelerator: one tagged operand is enough."""
    tensors = tensors_in(values)
    if any(t.device.type == "meta" for t in tensors):
        return False
    return any(map(is_tagged, tensors))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _floating(value):
        # CUDA lets a zero-dim CPU tensor meet CUDA tensors, and does not cast it.
        number = value.dim() == 0 and not is_tagged(value)
        return value if number else value.to(dtype)
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return [_cast(item, dtype) for item in value]
    return value


def _run(op: Any, dtype: torch.dtype | None, args: Any, kwargs: Any) -> Any:
    if dtype is not None:
        args = [_cast(value, dtype) for value in args]
        kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
    return op(*args, **kwargs)


Kernel = Callable[..., Any]


def _kernel(op: Any, run: Kernel) -> Kernel:
    """Return a kernel that calls `run(op, args, kwargs)` if the operation is on the accelerator."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # With autocast on `op` would call this kernel again; function modes have seen it already.
        with torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            if not _is_there([*args, *kwargs.values()]):
                return op(*args, **kwargs)
            return run(op, args, kwargs)

    return kernel


def _lower(op: Any, args: Any, kwargs: Any) -> Any:
    return _run(op, low_dtype(torch.get_autocast_dtype("cuda")), args, kwargs)


def _float32(op: Any, args: Any, kwargs: Any) -> Any:
    return _run(op, torch.float32, args, kwargs)


def _widest(op: Any, args: Any, kwargs: Any) -> Any:
    dtypes = {t.dtype for t in tensors_in([*args, *kwargs.values()]) if _floating(t)}
    if torch.float32 in dtypes:
        return _run(op, torch.float32, args, kwargs)
    return _lower(op, args, kwargs)


def _float32_result(op: Any, args: Any, kwargs: Any) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if _floating(args[0]) and given.get("dtype") is None:
        positions = [i for i, a in enumerate(op._schema.arguments) if not a.kwarg_only]
        args = [given.get(names[i]) for i in positions if i < len(args) and names[i] != "dtype"]
        kwargs = {**kwargs, "dtype": torch.float32}
    return op(*args, **kwargs)


def _norm(op: Any, args: Any, kwargs: Any) -> Any:
    wanted = torch.float32 if _floating(args[0]) else args[0].dtype
    full = [*args, 2] if len(args) == 1 else list(args)
    # The overload with a dtype has no default for `keepdim`.
    full += [False] * (len(full) == 3 and "keepdim" not in kwargs)
    return op(*full, **kwargs, dtype=wanted)


def _banned(op: Any, args: Any, kwargs: Any) -> Any:
    del op, args, kwargs
    # The refusal is torch's own (RuntimeError), which code may catch.
    msg = (
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast."
        " Use binary_cross_entropy_with_logits or BCEWithLogitsLoss, which take what goes into the"
        " sigmoid"
    )
    raise RuntimeError(msg)


# -- registration ----------------------------------------------------------------------------------


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def kernels() -> dict[str, Kernel]:
    """Return the kernel of each operation by its name in aten."""
    table = {
        _lower: (*LOWER_PRECISION, *RECURRENT),
        _float32: FLOAT32,
        _float32_result: FLOAT32_RESULT,
        _widest: WIDEST,
        _banned: BANNED,
    }
    made = {name: _kernel(_overload(name), run) for run, names in table.items() for name in names}
    return made | {name: _kernel(_overload(to), _norm) for name, to in NORMS.items()}


class Kernels:
    """Our kernels in torch's dispatcher, registered when CUDA's autocast is first turned on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: Any = None

    def need(self) -> None:
        """Register the kernels unless they are registered already."""
        with self._lock:
            if self._library is not None:
                return
            library = torch.library.Library("aten", "IMPL", "AutocastCUDA")
            with warnings.catch_warnings():
                # torch warns that its own kernels are overridden, which is the purpose here.
                warnings.filterwarnings("ignore", message="Warning only once for all operators")
                for name, kernel in kernels().items():
                    library.impl(name, kernel)
            self._library = library

    def release(self) -> None:
        """Unregister our kernels, which makes torch's own active again."""
        with self._lock:
            if self._library is not None:
                self._library._destroy()
                self._library = None


KERNELS = Kernels()


def switch(*, on: bool) -> None:
    """Include or exclude CUDA's autocast key in the dispatch of this thread's operations."""
    if on:
        KERNELS.need()
    torch._C._dispatch_tls_set_dispatch_key_included(CUDA_KEY, on)
