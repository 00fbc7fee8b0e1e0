"""FLOPs, kernels and arrays of a traced program, counted in its jaxpr before it is compiled.

XLA's own count (`compiled.cost_analysis()`) has no Pallas kernels, and counts a loop's body once.
"""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from jax.extend import core

from tpuport.cost.kernel_masks import active_shares
from tpuport.cost.kernels import dot_sizes, read_call
from tpuport.cost.modules import innermost, scope_names
from tpuport.cost.records import Constant, Dot, JaxprCost, Kernel, ModuleCost, ScoreArray
from tpuport.cost.walking import PALLAS, inner_jaxprs, open_jaxpr, sub_jaxprs

# A contraction no longer than this makes scores of queries and keys, not a layer's output.
_LONGEST_HEAD = 512
# Work that is not counted, because it is no product.
_UNCOUNTED = ("fft", "cholesky", "triangular_solve", "eigh", "svd", "qr", "lu")


def count_jaxpr(
    jaxpr: Any, *, modules: Collection[str] | None = None, score_size: int = 1024
) -> JaxprCost:
    """Count the work and the arrays of a traced program.

    Args:
        jaxpr: a closed jaxpr, such as `jax.jit(f).trace(...).jaxpr`.
        modules: names of modules; an operation belongs to the innermost of them around it. None
            takes any `jax.named_scope`.
        score_size: fewest queries and fewest keys of an array that counts as attention scores.

    Returns:
        Sums over all chips. A scan's body counts as often as it runs, a `cond` as its costliest
        branch, the body of a `shard_map` once a shard, and the body of a `while` once, which
        `unknown` says. Backward passes are included if they are in the jaxpr.
    """
    counter = _Counter(modules, active_shares(jaxpr))
    counter.visit(open_jaxpr(jaxpr), 1, ())
    scores = _Scores(counter, score_size)
    scores.visit(open_jaxpr(jaxpr), ())
    by_module: dict[str, ModuleCost] = {}
    for module, flops, num_bytes in counter.work():
        old = by_module.get(module, ModuleCost())
        by_module[module] = ModuleCost(old.flops + flops, old.bytes + num_bytes)
    return JaxprCost(
        flops=sum(one.flops for one in by_module.values()),
        bytes=sum(one.bytes for one in by_module.values()),
        modules=dict(sorted(by_module.items(), key=lambda item: -item[1].flops)),
        dots=tuple(dot for dot, _ in counter.dots),
        kernels=tuple(counter.kernels),
        constants=_constants(jaxpr),
        scores=tuple(scores.found.values()),
        unknown=tuple(dict.fromkeys(counter.unknown)),
    )


class _Counter:
    """Collector of products and kernels, equation by equation."""

    def __init__(self, modules: Collection[str] | None, shares: dict[int, float]):
        self.modules = modules
        self.shares = shares
        self.dots: list[tuple[Dot, int]] = []
        self.kernels: list[Kernel] = []
        self.unknown: list[str] = []
        self._reads: dict[str, Callable[[Any, str, int], tuple[Dot, int]]] = {
            "dot_general": _read_dot,
            "conv_general_dilated": _read_convolution,
            "ragged_dot_general": _read_ragged_dot,
        }

    def work(self) -> Iterable[tuple[str, int, int]]:
        """Yield module, FLOPs and bytes of everything collected."""
        for dot, num_bytes in self.dots:
            yield dot.module, dot.flops, num_bytes * dot.times
        for kernel in self.kernels:
            yield kernel.module, kernel.flops * kernel.times, kernel.bytes * kernel.times

    def visit(self, jaxpr: Any, times: int, names: tuple[str, ...]) -> None:
        """Count every equation of a jaxpr that runs `times` times, within these names."""
        for eqn in jaxpr.eqns:
            inner = (*names, *scope_names(eqn.source_info.name_stack))
            self._visit_equation(eqn, times, inner)

    def _visit_equation(self, eqn: Any, times: int, names: tuple[str, ...]) -> None:
        name = eqn.primitive.name
        module = innermost(names, self.modules)
        if read := self._reads.get(name):
            self.dots.append(read(eqn, module, times))
        elif name == PALLAS:
            self._add_kernel(eqn, module, times)
        elif name == "cond":
            self._visit_branches(eqn, times, names)
        elif name in _UNCOUNTED:
            self.unknown.append(f"the FLOPs of {name}{_within(module)}")
        else:
            self._visit_inner(eqn, times, names)

    def _visit_inner(self, eqn: Any, times: int, names: tuple[str, ...]) -> None:
        name = eqn.primitive.name
        if name == "scan":
            times *= eqn.params["length"]
        elif name == "shard_map":
            times *= num_shards(eqn)
        elif name == "while":
            before = len(self.dots) + len(self.kernels)
            self.visit(open_jaxpr(eqn.params["body_jaxpr"]), times, names)
            if len(self.dots) + len(self.kernels) > before:
                module = innermost(names, self.modules)
                self.unknown.append(
                    f"how often a while loop{_within(module)} runs; it is counted once"
                )
            return
        for sub in sub_jaxprs(eqn):
            self.visit(sub, times, names)

    def _visit_branches(self, eqn: Any, times: int, names: tuple[str, ...]) -> None:
        best = None
        for branch in eqn.params["branches"]:
            counter = _Counter(self.modules, self.shares)
            counter.visit(open_jaxpr(branch), times, names)
            if best is None or _flops(counter) > _flops(best):
                best = counter
        if best is not None:
            self.dots += best.dots
            self.kernels += best.kernels
            self.unknown += best.unknown

    def _add_kernel(self, eqn: Any, module: str, times: int) -> None:
        call = read_call(eqn, self.shares.get(id(eqn)))
        if not call.flops:
            self.unknown.append(f"the FLOPs of the kernel {call.name}{_within(module)}")
        self.kernels.append(
            Kernel(module, call.name, call.grid, call.flops, call.exact, call.bytes, times)
        )


def num_shards(eqn: Any) -> int:
    """Return on how many chips the body of a `shard_map` runs, each with its own shard."""
    mesh = eqn.params["mesh"]
    axes = eqn.params.get("manual_axes") or mesh.axis_names
    return math.prod(mesh.shape[axis] for axis in axes)


def _flops(counter: _Counter) -> int:
    return sum(flops for _, flops, _ in counter.work())


def _within(module: str) -> str:
    return f" in {module}" if module else ""


def _moved(eqn: Any) -> int:
    avals = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def _dot(eqn: Any, module: str, times: int, sizes: Iterable[int]) -> tuple[Dot, int]:
    lhs, rhs, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    dtypes = str(lhs.dtype), str(rhs.dtype), str(out.dtype)
    batch, rows, columns, contraction = sizes
    kind = eqn.primitive.name
    dot = Dot(module, kind, *dtypes, batch, rows, columns, contraction, times)
    return dot, _moved(eqn)


def _read_dot(eqn: Any, module: str, times: int) -> tuple[Dot, int]:
    lhs, rhs = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    contracted, batch = eqn.params["dimension_numbers"]
    return _dot(eqn, module, times, dot_sizes(lhs, rhs, contracted, batch))


def _read_ragged_dot(eqn: Any, module: str, times: int) -> tuple[Dot, int]:
    """Count a ragged product: each row meets one group only, so groups do not multiply the work."""
    lhs, rhs = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    num_batch, rows, columns, contraction = dot_sizes(lhs, rhs, contracted, batch)
    groups = math.prod(rhs[dim] for dim in numbers.rhs_group_dimensions)
    return _dot(eqn, module, times, (num_batch, rows, columns // groups, contraction))


def _read_convolution(eqn: Any, module: str, times: int) -> tuple[Dot, int]:
    """Count a convolution.

    Positions that read padding are counted, because a TPU computes them. The holes that a
    transposed convolution puts between its inputs are not.
    """
    rhs, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    channels = rhs[eqn.params["dimension_numbers"].rhs_spec[0]]
    rows = math.prod(out) // channels
    holes = math.prod(eqn.params["lhs_dilation"])
    contraction = math.prod(rhs) // channels
    if holes > 1:
        rows = rows // holes or 1
    return _dot(eqn, module, times, (1, rows, channels, contraction))


class _Scores:
    """Finder of arrays of the size of attention scores, outside of kernels."""

    def __init__(self, counter: _Counter, size: int):
        self.modules = counter.modules
        self.pairs = {
            pair
            for dot, _ in counter.dots
            if dot.kind == "dot_general" and dot.batch > 1 and dot.contraction <= _LONGEST_HEAD
            and min(dot.rows, dot.columns) >= size
            for pair in ((dot.rows, dot.columns), (dot.columns, dot.rows))
        }  # fmt: skip
        self.size = size
        self.found: dict[tuple[Any, ...], ScoreArray] = {}

    def visit(self, jaxpr: Any, names: tuple[str, ...]) -> None:
        """Look at the results of every equation of a jaxpr."""
        for eqn in jaxpr.eqns:
            inner = (*names, *scope_names(eqn.source_info.name_stack))
            if eqn.primitive.name == PALLAS:
                continue
            for var in eqn.outvars:
                self._look(eqn, var.aval, innermost(inner, self.modules))
            for sub in sub_jaxprs(eqn):
                self.visit(sub, inner)

    def _look(self, eqn: Any, aval: Any, module: str) -> None:
        shape = getattr(aval, "shape", ())
        if len(shape) < 2 or not self._is_score(shape, aval.dtype):
            return
        key = (module, shape, str(aval.dtype))
        num_bytes = math.prod(shape) * aval.dtype.itemsize
        self.found.setdefault(
            key, ScoreArray(module, eqn.primitive.name, shape, str(aval.dtype), num_bytes)
        )

    def _is_score(self, shape: tuple[int, ...], dtype: Any) -> bool:
        if tuple(shape[-2:]) in self.pairs:
            return True
        # A mask that no product has met (yet): boolean, and as large in both dims.
        return str(dtype) == "bool" and shape[-1] == shape[-2] >= self.size


def _constants(jaxpr: Any) -> tuple[Constant, ...]:
    """Return the literals of a jaxpr and of those within it, each once, the largest first."""
    arrays: dict[int, Any] = {}
    pending = [jaxpr]
    while pending:
        one = pending.pop()
        if isinstance(one, core.ClosedJaxpr):
            arrays.update({id(value): value for value in one.consts})
        for eqn in open_jaxpr(one).eqns:
            pending += inner_jaxprs(eqn)
    found = [
        Constant(tuple(value.shape), str(value.dtype), int(value.nbytes))
        for value in arrays.values()
        if hasattr(value, "nbytes")
    ]
    return tuple(sorted(found, key=lambda constant: -constant.bytes))
