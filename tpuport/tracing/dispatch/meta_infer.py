"""Meta tensors for the result of an op: its sizes, strides and dtypes without its values.

torch's own meta functions are the reference. For the ops that models are made of they are Python
decompositions that take longer than tracing the op in JAX (and import dynamo), so those ops have a
rule in `meta_rules` for the plain case. Anything else asks torch, once per signature.
"""

from collections.abc import Iterable
from typing import Any

import torch

from tpuport.foundation.pytree import is_sparse
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import TracedTensor, meta_of
from tpuport.tracing.core.values import flat, map_tensors
from tpuport.tracing.dispatch.meta_rules import RULES, pointwise
from tpuport.tracing.dispatch.meta_strides import as_convolved

aten = torch.ops.aten


_KNOWN: dict[Any, Any] = {}


def infer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return meta tensors for the result of an op on traced and host tensors.

    Raises:
        RuntimeError: what torch raises in eager (shapes or dtypes that do not fit).
        PortError: the size of the result depends on data, or it may be sparse.
    """
    if any(isinstance(t, torch.Tensor) and is_sparse(t) for t in flat(args, kwargs)):
        args, kwargs = _without_sparse(func, args, kwargs)
    rule = RULES.get(func._opname) or (pointwise if torch.Tag.pointwise in func.tags else None)
    if rule is not None:
        found = rule(func, args, kwargs)
        if found is not None:
            return found
    key = _key(func, args, kwargs)
    if key is None:
        return from_torch(func, args, kwargs)
    known = _KNOWN.get(key)
    if known is None:
        known = _KNOWN[key] = from_torch(func, args, kwargs)
        if len(_KNOWN) > 20000:
            _KNOWN.clear()
    return known


# Ops without a meta kernel whose result looks like their first operand.
_LIKE_FIRST = {aten._sample_dirichlet.default, aten.binomial.default}


# Products whose meta kernels take operands of different dtypes, which eager refuses.
_ONE_DTYPE = {
    *(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.vdot.default),
    *(aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.addbmm.default),
    aten.convolution.default,
}


def check_one_dtype(operands: Iterable[Any]) -> None:
    """Refuse what eager refuses: a product of tensors of different dtypes.

    Raises:
        RuntimeError: as eager does.
    """
    dtypes = dict.fromkeys(o.dtype for o in operands if isinstance(o, torch.Tensor))
    if len(dtypes) > 1:
        names = " != ".join(str(d).removeprefix("torch.") for d in dtypes)
        msg = f"expected the operands of a product to have the same dtype, but got: {names}"
        raise RuntimeError(msg)


def from_torch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the op on meta tensors."""
    if func in _ONE_DTYPE:
        check_one_dtype(args[:3])
    if func in _LIKE_FIRST:
        return torch.empty_like(meta_of(args[0]), memory_format=torch.contiguous_format)
    meta_kwargs = {k: map_tensors(to_meta, v) for k, v in kwargs.items()}
    if "generator" in meta_kwargs:
        meta_kwargs["generator"] = None
    if "device" in meta_kwargs or _is_factory(func, args):
        meta_kwargs["device"] = torch.device("meta")
    meta_args = [map_tensors(to_meta, a) for a in _with_some_range(func, args)]
    try:
        try:
            made = func(*meta_args, **meta_kwargs)
            is_convolution = func is aten.convolution.default
            return as_convolved(made, *meta_args[:2]) if is_convolution else made
        except RuntimeError as error:
            if not any(text in str(error) for text in ("same device", "expected device meta")):
                raise
            # Some ops take no 0-d CPU tensor beside meta tensors.
            return func(*(map_tensors(meta_of, a) for a in meta_args), **meta_kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, NotImplementedError) or "meta tensor" in str(error):
            raise port_error(
                f"the size of the result of {func._opname} depends on data",
                code="TPU203",
                remedy=(
                    "pass what determines the size as Python numbers, or select with torch.where"
                ),
                cause=error,
            ) from error
        raise


def _with_some_range(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a draw with a range that is not empty, if they have a traced bound.

    `value_checks` looks whether the range that the program computes is empty.
    """
    traced = any(isinstance(a, torch.SymInt) for a in args)
    if not traced or not func._opname.startswith("randint"):
        return args
    bounds = [place for place, a in enumerate(args) if isinstance(a, (int, torch.SymInt))]
    return tuple(int(n == bounds[-1]) if n in bounds else a for n, a in enumerate(args))


def _is_factory(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an op makes a tensor from numbers alone.

    Unless it is told the meta device it makes a real one (and draws real random numbers).
    """
    return not any(isinstance(a, torch.Tensor) for a in args) and any(
        a.name == "device" for a in func._schema.arguments
    )


# Ops whose result is dense for a sparse tensor and a dense one.
_PRODUCTS = {"mm", "bmm", "mv", "addmm", "addmv", "baddbmm"}


def _without_sparse(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the operands of a product with meta tensors for sparse ones.

    Raises:
        PortError: the op is no product of matrices, so that its result may be sparse.
    """
    if func._opname not in _PRODUCTS:
        raise port_error(
            f"{func._opname} of a sparse tensor and a value of the program",
            code="TPU105",
            remedy="make the sparse tensor dense before (.to_dense()), or multiply matrices by it"
            " (torch.spmm, @)",
        )

    def dense(value: torch.Tensor) -> torch.Tensor:
        if not is_sparse(value):
            return value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return tuple(map_tensors(dense, a) for a in args), {
        k: map_tensors(dense, v) for k, v in kwargs.items()
    }


def to_meta(value: Any) -> Any:
    """Return a stand-in without data for an operand."""
    if isinstance(value, sym_numbers.SYMBOLIC):
        return sym_numbers.placeholder(value)
    if isinstance(value, TracedTensor):
        return meta_of(value)
    # A 0-d CPU tensor may meet meta tensors: torch then treats it as it would in eager.
    return value if value.dim() == 0 else meta_of(value)


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts: list[Any] = [func]
    for value in (*args, *kwargs.items()):
        part = _part(value)
        if part is None:
            return None
        parts.append(part)
    try:
        hash(key := tuple(parts))
    except TypeError:
        return None
    return key


def _part(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, TracedTensor) and value.dim() == 0:
            return None  # some meta functions read the value of a host scalar
        traced = isinstance(value, TracedTensor)
        return (
            torch.Tensor.size(value),
            value.stride(),
            value.dtype,
            traced,
            torch.get_default_dtype(),
        )
    if isinstance(value, (list, tuple)):
        parts = tuple(_part(v) for v in value)
        return (
            None
            if any(p is None and v is not None for p, v in zip(parts, value, strict=True))
            else ("list", parts)
        )
    if isinstance(value, sym_numbers.SYMBOLIC):
        return type(value)
    if value is None:
        return "None"
    return (type(value), value)
