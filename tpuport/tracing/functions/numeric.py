"""Torch functions whose C++ checks values before it computes.

Of the inverse STFT and the weighted covariance the checks would be branches on traced values, and
the formulas here have none. Others check nothing if the values are not there.
"""

from typing import Any

import torch

from tpuport.tracing.core.context import Trace
from tpuport.tracing.dispatch.value_checks import check_values
from tpuport.tracing.dynamic_shapes.handlers import involved
from tpuport.tracing.functions.registry import function, holds_traced


def _bind(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


_ISTFT = (
    *("input", "n_fft", "hop_length", "win_length", "window", "center", "normalized", "onesided"),
    *("length", "return_complex"),
)


@function(torch.istft, torch.Tensor.istft)
def _istft(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    bound = _bind(_ISTFT, args, kwargs)
    spectrum, window = bound["input"], bound.get("window")
    if not holds_traced(trace, [spectrum, window]) or involved(args, kwargs):
        return NotImplemented
    n_fft = bound["n_fft"]
    hop = bound.get("hop_length") or n_fft // 4
    width = bound.get("win_length") or n_fft
    complex_out = bound.get("return_complex", False)
    lead, frames = spectrum.shape[:-2], spectrum.shape[-1]
    if window is None:
        window = torch.ones(width, dtype=spectrum.real.dtype)
    left = (n_fft - width) // 2
    window = torch.nn.functional.pad(window, (left, n_fft - width - left))
    columns = spectrum.reshape(-1, *spectrum.shape[-2:]).transpose(1, 2)
    norm = "ortho" if bound.get("normalized") else "backward"
    if complex_out:
        pieces = torch.fft.ifft(columns, n_fft, dim=-1, norm=norm)
    else:
        # ATen too reads only one half of a two-sided spectrum.
        pieces = torch.fft.irfft(columns[..., : n_fft // 2 + 1], n_fft, dim=-1, norm=norm)
    total = n_fft + hop * (frames - 1)
    signal = _overlapped(pieces * window, hop, total)
    envelope = _overlapped((window * window).expand(1, frames, n_fft), hop, total)
    start = n_fft // 2 if bound.get("center", True) else 0
    length = bound.get("length")
    end = start + length if length is not None else total - start
    kept = slice(start, min(end, total))
    signal = signal[:, kept] / envelope[:, kept]
    if end > total:
        signal = torch.nn.functional.pad(signal, (0, end - total))
    return signal.reshape(*lead, -1)


def _overlapped(pieces: torch.Tensor, hop: int, total: int) -> torch.Tensor:
    """Add up pieces [B, T, n], each placed `hop` after the one before, to [B, total]."""
    steps = torch.arange(pieces.shape[1]) * hop
    places = (steps[:, None] + torch.arange(pieces.shape[2])).reshape(-1)
    flat = pieces.reshape(pieces.shape[0], -1)
    return torch.zeros(flat.shape[0], total, dtype=flat.dtype).index_add(1, places, flat)


@function(torch.cov, torch.Tensor.cov)
def _cov(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    bound = _bind(("input",), args, kwargs)
    x, counts, weights = bound["input"], bound.get("fweights"), bound.get("aweights")
    if not holds_traced(trace, [counts, weights]) or involved(args, kwargs):
        return NotImplemented
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    dtype = rows.dtype if rows.is_floating_point() or rows.is_complex() else torch.float32
    rows = rows.to(dtype)
    share = counts if weights is None else weights if counts is None else counts * weights
    assert share is not None  # one of the two is traced
    total = share.sum()
    mean = (rows * share).sum(1, keepdim=True) / total
    correction = bound.get("correction", 1)
    if weights is not None and correction:
        norm = total - correction * (share * weights).sum() / total
    else:
        norm = total - correction
    centred = rows - mean
    return ((centred * share) @ centred.mT.conj() / norm.clamp(min=0)).squeeze()


def _linear_cross_entropy(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute the loss whole: how it is cut into chunks is XLA's business."""
    if kwargs.get("options") is None or not holds_traced(trace, [*args, *kwargs.values()]):
        return NotImplemented
    return func(*args, **kwargs | {"options": None})


# The one function here that torch 2.11 does not have yet.
if hasattr(torch.nn.functional, "linear_cross_entropy"):
    function(torch.nn.functional.linear_cross_entropy)(_linear_cross_entropy)


@function(torch.nn.functional.one_hot)
def _one_hot(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    if holds_traced(trace, [*args, *kwargs.values()]):
        bound = _bind(("self", "num_classes"), args, kwargs)
        bound["self"] = bound.pop("tensor", bound.get("self"))
        check_values(trace, torch.ops.aten.one_hot.default, (), bound)
    return NotImplemented
