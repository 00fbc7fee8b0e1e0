"""A listing of where a traced program changes precision, and of the dtypes of products and sums."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tpuport.cost.walking import sub_jaxprs
from tpuport.foundation.interop.name_patterns import generalised
from tpuport.foundation.reporting.json_codec import encoded
from tpuport.foundation.reporting.markup import plural
from tpuport.foundation.user_frames import inside_prefixes
from tpuport.model import lowering
from tpuport.model.ported_model import PortedModel
from tpuport.tracing.core.keys import unused_key
from tpuport.tracing.state.request import TraceRequest

Kind = Literal["product", "change", "sum"]
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
# Primitives that accumulate many elements in the dtype of their operand.
_SUMS = (
    *("reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "scatter-add"),
    *("scatter_add", "reduce_window_sum"),
)
_SHOWN = 12


@dataclass(frozen=True)
class AuditPlace:
    """The operations of one kind on one line of the user's code.

    Attributes:
        kind: "product" (matmul, convolution), "change" (a cast between floating dtypes) or "sum"
            (a sum or product over many elements that is accumulated in 16 bits or less).
        dtypes: Dtypes of the operands; for a change the old and the new dtype.
        module: Fqn of the user's module, numbers as `*`; "" for the model itself.
        line: `file:line` of the user's code, "" if there is none.
        count: Number of executions, all rounds of loops included.
        flops: Floating-point operations of products, in total.
        bytes: Size of the results, in total.
    """

    kind: Kind
    dtypes: tuple[str, ...]
    module: str
    line: str
    count: int = 1
    flops: int = 0
    bytes: int = 0

    @property
    def flag(self) -> str | None:
        """Return why the operation may be a mistake, or None."""
        if self.kind == "product" and len(set(self.dtypes)) > 1:
            return "product of two dtypes"
        if self.kind == "product" and "float32" in self.dtypes:
            return "float32 product"
        return f"sum accumulated in {self.dtypes[0]}" if self.kind == "sum" else None

    def __str__(self) -> str:
        arrow = " -> " if self.kind == "change" else " x "
        what = self.flag or f"{self.kind} {arrow.join(self.dtypes)}"
        where = f"{self.module or 'the model'}  {self.line}".rstrip()
        return f"{what}  {where}  ({self.count} x, {self.bytes / 2**20:.3g} MiB)"


@dataclass(frozen=True)
class PrecisionAudit:
    """The places of a program that matter for precision; `str()` shows the largest of `places`."""

    name: str
    places: tuple[AuditPlace, ...] = field(repr=False)

    @property
    def flags(self) -> tuple[AuditPlace, ...]:
        """Return float32 products, mixed products, and sums in few bits, the largest first."""
        found = [place for place in self.places if place.flag is not None]
        return tuple(sorted(found, key=lambda p: (-p.flops, -p.bytes)))

    def of(self, kind: Kind) -> tuple[AuditPlace, ...]:
        """Return the places of one kind, the largest first."""
        found = [place for place in self.places if place.kind == kind]
        return tuple(sorted(found, key=lambda p: (-p.flops, -p.bytes)))

    def product_flops(self) -> dict[str, int]:
        """Return the floating-point operations of products by the dtypes of their operands."""
        found: dict[str, int] = {}
        for place in self.of("product"):
            key = " x ".join(dict.fromkeys(place.dtypes))
            found[key] = found.get(key, 0) + place.flops
        return found

    def to_json(self) -> str:
        """Return all places as JSON."""
        places = [encoded(place) | {"flag": place.flag} for place in self.places]
        return json.dumps({"name": self.name, "places": places}, indent=1)

    def __str__(self) -> str:
        flops = self.product_flops()
        total = sum(flops.values()) or 1
        shares = ", ".join(f"{100 * n / total:.3g} % {dtypes}" for dtypes, n in flops.items())
        lines = [f"{self.name}: products {shares or 'none'} (by FLOPs)"]
        for title, places in (("flagged", self.flags), ("casts", self.of("change"))):
            lines.append(f"{plural(len(places), 'place')} {title}{':' if places else ''}")
            lines += [f"  {place}" for place in places[:_SHOWN]]
            if len(places) > _SHOWN:
                lines.append(f"  and {len(places) - _SHOWN} more")
        return "\n".join(lines)


def precision_audit(
    target: PortedModel | Callable[..., Any],
    *args: Any,
    method: str = "forward",
    model: PortedModel | None = None,
    **kwargs: Any,
) -> PrecisionAudit:
    """List where a program changes precision, and the dtypes of its products and sums.

    This only traces and computes nothing, so shapes are enough for weights and arguments.

    Args:
        target: A ported model, whose method is traced; or a function of arrays (a training step).
        args: Arguments of the call: tensors, arrays or their shapes.
        method: The method of a ported model.
        model: The ported model that a function uses, so that its modules are known by name.
        kwargs: Keyword arguments of the call.

    Raises:
        PortError: The code cannot be ported exactly.
    """
    if isinstance(target, PortedModel):
        closed = _traced(target, method, args, kwargs)
        return audit_jaxpr(closed, target.report.model, _modules(target))
    closed = jax.make_jaxpr(target)(*args, **kwargs)
    names = frozenset[str]() if model is None else _modules(model)
    return audit_jaxpr(closed, getattr(target, "__name__", "function"), names)


def _modules(ported: PortedModel) -> frozenset[str]:
    return frozenset(fqn for fqn, _ in ported._module.named_modules() if fqn)


def _traced(ported: PortedModel, method: str, args: Any, kwargs: Any) -> Any:
    call = lowering.shapes_in(args, kwargs)

    def pure(state: Any, key: Any, values: Any) -> Any:
        request = TraceRequest(method, state, key, values, call.metas, call.spec, checks=False)
        return ported._tracer.trace(request).out_leaves

    with ported._precision_scope():
        return jax.make_jaxpr(pure)(ported.by_fqn(), unused_key(), call.values)


def audit_jaxpr(closed: Any, name: str, modules: frozenset[str] = frozenset()) -> PrecisionAudit:
    """Audit a traced program.

    Args:
        closed: A `ClosedJaxpr`.
        name: The name of the program.
        modules: The fqns of the user's modules, as they appear in the name stacks.
    """
    found: dict[Any, AuditPlace] = {}
    for place in _places(closed.jaxpr, None, 1, modules):
        key = (place.kind, place.dtypes, place.module, place.line)
        known = found.get(key)
        found[key] = place if known is None else _sum(known, place)
    return PrecisionAudit(name, tuple(found.values()))


def _sum(a: AuditPlace, b: AuditPlace) -> AuditPlace:
    total = {"count": a.count + b.count, "flops": a.flops + b.flops, "bytes": a.bytes + b.bytes}
    return replace(a, **total)


def _places(
    jaxpr: Any, outer: tuple[str, str] | None, times: int, modules: frozenset[str]
) -> Iterator[AuditPlace]:
    """Yield the places in a program and in the programs inside it."""
    for eqn in jaxpr.eqns:
        here = _site(eqn.source_info, modules)
        if outer is not None:
            # jax caches traced functions: equations in one may have the line of its first caller.
            here = outer if not here[1] or eqn.primitive.name in ("jit", "pjit") else here
            here = (here[0] or outer[0], here[1])
        place = _place(eqn)
        if place is not None:
            sized = {"count": times, "flops": place.flops * times, "bytes": place.bytes * times}
            yield replace(place, module=here[0], line=here[1], **sized)
        rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for part in sub_jaxprs(eqn):
            yield from _places(part, here, times * rounds, modules)


def _place(eqn: Any) -> AuditPlace | None:
    """Classify an equation; its module and line are still empty."""
    name = eqn.primitive.name
    ins: list[Any] = [getattr(var.aval, "dtype", None) for var in eqn.invars]
    out = eqn.outvars[0].aval if eqn.outvars else None
    if name in _PRODUCTS and out is not None:
        return AuditPlace("product", _names(ins[:2]), "", "", 1, _flops(eqn), _bytes(out))
    if out is None or not ins or not _is_floating(ins[0]):
        return None
    if name == "convert_element_type" and _is_floating(out.dtype) and out.dtype != ins[0]:
        return AuditPlace("change", _names([ins[0], out.dtype]), "", "", 1, 0, _bytes(out))
    if name in _SUMS and ins[0].itemsize < 4:
        return AuditPlace("sum", _names(ins[:1]), "", "", 1, 0, _bytes(eqn.invars[0].aval))
    return None


def _names(dtypes: list[Any]) -> tuple[str, ...]:
    return tuple(str(np.dtype(dtype)) for dtype in dtypes)


def _is_floating(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _flops(eqn: Any) -> int:
    a, b = (var.aval for var in eqn.invars[:2])
    out = eqn.outvars[0].aval.size
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(a.shape[dim] for dim in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        channels = b.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * out * (b.size // max(channels, 1))
    return 2 * out * a.shape[-1]


_WORD = re.compile(r"[^/()]+")
_INSIDE = inside_prefixes()


def _site(source: Any, modules: frozenset[str]) -> tuple[str, str]:
    """Return the user's module and line of an equation."""
    words = _WORD.findall(str(source.name_stack))
    module = next((word for word in reversed(words) if word in modules), "")
    frames = source.traceback.frames if source.traceback is not None else ()
    for frame in frames:
        if not frame.file_name.startswith((*_INSIDE, "<")):
            return generalised(module), f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return generalised(module), ""
