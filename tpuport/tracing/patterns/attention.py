"""Attention that is written out, softmax(q k^T + mask) v, given to a kernel.

A product of which one factor is a softmax, over the dim that the product sums, is attention if the
softmax is of another product. Between both may be a factor, a cap, a bias and a mask. If anything
but the product with the values reads the weights or the scores, they are needed, and a kernel saves
nothing. What is no attention for another reason stays as it is too, and the report says why.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuport.foundation.user_frames import inside_prefixes, user_site
from tpuport.kernels.attention import AttentionOptions, BlockSizes
from tpuport.tracing.attention.lower import (
    DROPS_WHOLE,
    AttentionOperands,
    CallPlace,
    drops_whole,
    has_few_scores,
    note_call,
    serving_kernel,
    structured_call,
)
from tpuport.tracing.attention.masks.graph import Node, computed
from tpuport.tracing.attention.masks.score_function import Changed, ScoreFunction
from tpuport.tracing.attention.masks.structure import (
    Structure,
    read_node,
    rows_seen,
    with_conditions,
)
from tpuport.tracing.attention.masks.tiles import ELEMENTWISE
from tpuport.tracing.attention.masks.two_valued import NOTHING
from tpuport.tracing.attention.masks.views import VIEWS, base
from tpuport.tracing.attention.options import options_for, shards_for
from tpuport.tracing.core.context import Trace
from tpuport.tracing.patterns.dropout import Dropout, dropout_of
from tpuport.tracing.patterns.program import FlatProgram, PatternMatch, RunningValues, is_var
from tpuport.tracing.patterns.run_time_masks import if_causal, if_rows_see
from tpuport.tracing.patterns.softmax import Softmax, softmax_of

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
_BETWEEN = (ELEMENTWISE | VIEWS) - {"stop_gradient"}
# What joins or splits leading dims, or drops one of size 1, as a product of a batch of one does.
_REGROUPS = ("reshape", "broadcast_in_dim", "squeeze")
_PRECISIONS: dict[Any, str] = {
    jax.lax.Precision.DEFAULT: "default",
    jax.lax.Precision.HIGH: "high",
    jax.lax.Precision.HIGHEST: "highest",
}

_FAST = ("splash", "flash")
# Tiles of the kernel for masks that are not what they usually are: memory is set aside for it.
_SMALL = BlockSizes(128, 256, 256)


class NotServedError(Exception):
    """An error for attention that no kernel computes; it says why."""


def find_attention(program: FlatProgram, trace: Trace) -> Iterator[PatternMatch]:
    """Yield the attentions of a program that a kernel may compute; the others are noted."""
    if options_for(trace.options.target) is None:
        return
    for product in program.equations:
        if product.primitive.name != "dot_general":
            continue
        for side in (0, 1):
            found = _written_out(program, product, side)
            if found is not None:
                yield from _checked(found, trace)
                break


def _checked(found: "WrittenOut", trace: Trace) -> Iterator[PatternMatch]:
    place = found.place(trace)
    if (place.file, place.line) in trace.full_attention:
        return  # `F.scaled_dot_product_attention` chose the matrix of scores
    try:
        found.check(trace)
    except NotServedError as error:
        found.note(trace, str(error))
    else:
        yield PatternMatch(found.product, lambda values: found.compute(trace, values))


def _written_out(program: FlatProgram, product: Any, side: int) -> "WrittenOut | None":
    """Return the attention whose weights are one factor of a product, or None."""
    behind = list(program.behind(product.invars[side], _BETWEEN))
    found = [s for eqn in behind if (s := softmax_of(program, eqn)) is not None]
    if not found:
        return None
    softmax = found[0]
    after = _path(program, softmax.equations[-1], behind)
    behind = list(program.behind(softmax.input, _BETWEEN))
    size = math.prod(softmax.input.aval.shape)
    scores = [one for one in behind if _is_product(one, size)]
    if not scores:
        return None
    between = _path(program, scores[0], behind)
    dropouts = [d for eqn in after if (d := dropout_of(program, eqn, size)) is not None]
    dropout = dropouts[0] if len(dropouts) == 1 else None
    return WrittenOut(program, product, side, softmax, after, scores, between, dropout)


def _is_product(eqn: Any, size: int) -> bool:
    return eqn.primitive.name == "dot_general" and math.prod(eqn.outvars[0].aval.shape) == size


def _path(program: FlatProgram, first: Any, among: list[Any]) -> list[Any]:
    """Return those of some equations that depend on the result of `first`, in order."""
    made, path = set(first.outvars), []
    for eqn in sorted(among, key=lambda eqn: program.order[id(eqn)]):
        if eqn is not first and any(is_var(atom) and atom in made for atom in eqn.invars):
            made.update(eqn.outvars)
            path.append(eqn)
    return path


class _Factor:
    """One factor of a product: its dims by their roles."""

    def __init__(self, product: Any, side: int) -> None:
        contracted, batch = product.params["dimension_numbers"]
        self.atom = product.invars[side]
        self.shape = tuple(self.atom.aval.shape)
        self.summed, self.batch = tuple(contracted[side]), tuple(batch[side])
        self.free = tuple(d for d in range(len(self.shape)) if d not in {*self.summed, *self.batch})
        if len(self.summed) != 1 or len(self.free) != 1:
            raise NotServedError("a product sums several dims, or keeps several")

    def laid_out(
        self,
        values: RunningValues,
        lead: Sequence[int],
        last: tuple[int, ...],
        sizes: tuple[int, int],
    ) -> Any:
        """Return the value as [batch, heads, ...]: these batch dims first, joined, then others."""
        value = jnp.transpose(values.read(self.atom), (*(self.batch[i] for i in lead), *last))
        return value.reshape(*sizes, *value.shape[len(lead) :])


@dataclass(frozen=True)
class _Layout:
    """The order of the dims of scores, until the leading ones are joined or split."""

    order: tuple[int, ...]
    shape: tuple[int, ...]
    regrouped: bool = False

    def through(self, eqn: Any) -> "_Layout":
        """Return the layout after an operation."""
        name, shape = eqn.primitive.name, tuple(eqn.outvars[0].aval.shape)
        if name in ELEMENTWISE and shape == self.shape:
            return self
        if name == "transpose" and not self.regrouped:
            return _Layout(tuple(self.order[p] for p in eqn.params["permutation"]), shape)
        if name in _REGROUPS and _keeps_last(self.shape, shape):
            return _Layout(self.order, shape, regrouped=True)
        raise NotServedError(f"the scores are rearranged by {name}")


@dataclass
class WrittenOut:
    """Attention written out.

    Attributes:
        program: The program.
        product: The product of weights and values.
        side: Which factor of it the weights are.
        softmax: The softmax.
        after: What is computed of the weights before the product.
        scores: Products of the softmax's size that it is of: that of queries and keys.
        between: What is computed of the scores before the softmax.
        dropout: The dropout of the weights, which is one of `after`.
    """

    program: FlatProgram
    product: Any
    side: int
    softmax: Softmax
    after: list[Any]
    scores: list[Any]
    between: list[Any]
    dropout: Dropout | None = None

    def check(self, trace: Trace) -> None:
        """Raise `NotServedError` if no kernel computes this, as far as shapes and readers tell."""
        if len(self.scores) > 1:
            raise NotServedError("the softmax is of more than one product")
        shape = self.softmax.input.aval.shape
        if len(shape) < 2 or self.softmax.axis != len(shape) - 1:
            raise NotServedError("the softmax is not over the last dim")
        swapped = False
        for eqn in self.after:
            if self.dropout is not None and eqn is self.dropout.equation:
                if swapped:
                    raise NotServedError("the weights are transposed before their dropout")
                continue
            name, before, after = eqn.primitive.name, eqn.invars[0].aval, eqn.outvars[0].aval
            is_view = name in _REGROUPS and _keeps_last(before.shape, after.shape)
            swapped ^= _swaps_last(eqn)
            is_view |= _swaps_last(eqn)
            if not is_view and not (name == "convert_element_type" and after.dtype in _FLOATS):
                raise NotServedError(f"the weights are changed by {name} after the softmax")
        weights = _Factor(self.product, self.side)
        last = (weights.free[0], weights.summed[0])
        rank = len(weights.shape)
        if last != ((rank - 1, rank - 2) if swapped else (rank - 2, rank - 1)):
            raise NotServedError("the product with the values sums another dim than the softmax")
        dropped = [] if self.dropout is None else self.dropout.factor
        chain = [*self.scores, *self.between, *self.softmax.equations, *dropped, *self.after]
        chain.append(self.product)
        reader = self.program.other_reader(chain)
        if reader is True:
            raise NotServedError("the weights are a result, too")
        if reader is not None:
            raise NotServedError(f"{reader.primitive.name}{_at(reader)} reads the weights, too")
        self._check_operands(trace)

    def _check_operands(self, trace: Trace) -> None:
        factors = self.factors()
        arrays = [jax.ShapeDtypeStruct(f.shape, f.atom.aval.dtype) for f in factors]
        for array in arrays:
            if array.dtype not in _FLOATS:
                raise NotServedError(f"{array.dtype.name} operands")
        if not all(math.prod(array.shape) for array in arrays):
            raise NotServedError("no queries, or nothing to attend to")
        self.precision()
        options = options_for(trace.options.target)
        if options is not None and options.kernel == "auto" and not options.interpret:
            q, k, v = (
                jax.ShapeDtypeStruct((*self.sizes, f.shape[a], f.shape[b]), array.dtype)
                for f, array, (a, b) in zip(factors, arrays, self.last(factors), strict=True)
            )
            if has_few_scores(q, k, v, shards_for(trace.options.mesh, q.shape[:3])):
                raise NotServedError("the scores are few")

    def layout(self) -> _Layout:
        """Return how the softmax's input is laid out, compared with the product."""
        (scores,) = self.scores
        shape = tuple(scores.outvars[0].aval.shape)
        known = {scores.outvars[0]: _Layout(tuple(range(len(shape))), shape)}
        for eqn in self.between:
            given = {known[atom] for atom in eqn.invars if is_var(atom) and atom in known}
            if len(given) != 1:
                raise NotServedError("the scores are added to a view of themselves")
            known[eqn.outvars[0]] = given.pop().through(eqn)
        return known[self.softmax.input]

    def factors(self) -> tuple[_Factor, _Factor, _Factor]:
        """Return queries, keys and values."""
        left, right = (_Factor(self.scores[0], side) for side in (0, 1))
        num = len(left.batch)
        last = self.layout().order[-2:]
        if last not in ((num, num + 1), (num + 1, num)):
            raise NotServedError("the scores are rearranged")
        q, k = (left, right) if last[0] == num else (right, left)
        return q, k, _Factor(self.product, 1 - self.side)

    @staticmethod
    def last(factors: Sequence[_Factor]) -> list[tuple[int, int]]:
        """Return the dims of queries, keys and values that become the last two."""
        q, k, v = factors
        return [(q.free[0], q.summed[0]), (k.free[0], k.summed[0]), (v.summed[0], v.free[0])]

    @property
    def sizes(self) -> tuple[int, int]:
        """Return batch and heads."""
        lead = self.softmax.input.aval.shape[:-2]
        if len(lead) < 2:
            return math.prod(lead), 1
        return math.prod(lead[:-1]), lead[-1]

    def precision(self) -> str | None:
        """Return the precision of both products, as `jax.default_matmul_precision` takes it."""
        found = {eqn.params["precision"] for eqn in (self.scores[0], self.product)}
        one = found.pop()
        both = {one} if one is None or isinstance(one, jax.lax.Precision) else set(one)
        if found or len(both) != 1:
            raise NotServedError("the products have several precisions")
        return _PRECISIONS.get(both.pop())

    def compute(self, trace: Trace, values: RunningValues) -> list[Any] | None:
        """Compute the product by a kernel; return None if none serves."""
        try:
            with _scopes(self.product), jax.default_matmul_precision(self.precision()):
                return [self._computed(trace, values)]
        except NotServedError as error:
            self.note(trace, str(error))
            return None

    def _computed(self, trace: Trace, values: RunningValues) -> Any:
        options = options_for(trace.options.target)
        assert options is not None
        factors, lead = self.factors(), self.layout().order[:-2]
        weights = _Factor(self.product, self.side)
        leads = (lead, lead, [weights.batch.index(d) for d in range(len(weights.batch))])
        q, k, v = (
            factor.laid_out(values, lead, last, self.sizes)
            for factor, lead, last in zip(factors, leads, self.last(factors), strict=True)
        )
        q, k, v = _of_one_dtype(q, k, v)
        effect = self._effect(values)
        found, strict = self._structures(effect, (*q.shape[:3], k.shape[2]))
        rate, key = 0.0, None
        if self.dropout is not None:
            rate, key = self.dropout.rate, values.read(self.dropout.key)
        call = AttentionOperands(scale=effect.scale, softcap=effect.softcap, dropout=rate, key=key)
        if options.kernel == "splash" != serving_kernel(trace, q, found, call, options):
            raise NotServedError("splash is asked for, and cannot serve it")

        def run(found: Structure, options: AttentionOptions = options) -> jax.Array:
            return structured_call(trace, (q, k, v), found, call, options, self.place(trace))

        simpler = if_causal(found) or if_rows_see(strict)
        if simpler is not None and serving_kernel(trace, q, simpler[1], call, options) not in _FAST:
            simpler = None
        served = found if simpler is None else simpler[1]
        if drops_whole(trace, q, served, call, options):
            raise NotServedError(DROPS_WHOLE)
        if simpler is None:
            out = run(found)
        else:
            holds, other, words = simpler
            rare = replace(options, blocks=options.blocks or _SMALL)
            out = jax.lax.cond(holds, lambda: run(other), lambda: run(found, rare))
            notes = trace.recorder.counters.attention
            first, second = notes[-2:]
            reason = f"if {words}, which the program checks; otherwise {second.kernel}"
            notes[-2:] = [replace(first, reason=reason)]
        seen = None if self.softmax.zeros else rows_seen(found)
        if seen is not None:
            out = _nan_unless_seen(effect.bias is not None, out, q, k, v, seen)
        return self._as_product(out, weights)

    def _as_product(self, out: Any, weights: _Factor) -> jax.Array:
        """Return the result [batch, heads, queries, size] in the layout of the product."""
        out = out.reshape(*(weights.shape[d] for d in range(len(weights.batch))), *out.shape[-2:])
        num = len(weights.batch)
        last = (num, num + 1) if self.side == 0 else (num + 1, num)
        out = jnp.transpose(out, (*weights.batch, *last))
        return out.astype(self.product.outvars[0].aval.dtype)

    def _effect(self, values: RunningValues) -> Changed:
        """Return what is done to the scores before the softmax."""
        score, top = values.node(self.scores[0].outvars[0]), values.node(self.softmax.input)
        function = ScoreFunction(score, lambda node: base(node) is score, top.shape, rounds=True)
        effect = function.effect(top)
        if effect is None:
            names = dict.fromkeys(eqn.primitive.name for eqn in self.between)
            raise NotServedError(
                f"the scores are changed in a way without a name: {', '.join(names)}"
            )
        return effect

    def _structures(
        self, effect: Changed, shape: tuple[int, ...]
    ) -> tuple[Structure, Structure | None]:
        """Return the mask; and as it is if each query sees a key, should that be simpler."""

        def made(*, strict: bool) -> Structure:
            found = Structure(shape)
            if effect.bias is not None:
                alone = not effect.conditions
                found = read_node(_four(effect.bias, shape), shape, alone=alone, strict=strict)
            for node in effect.conditions:
                found = with_conditions(found, _four(node, shape))
            return found

        found = made(strict=False)
        strict = made(strict=True)
        if not effect.conditions or not np.isfinite(effect.fill):
            return found, None if found.bias is None or strict.bias is not None else strict
        rest = [_four(node, shape) for node in effect.conditions]
        if effect.bias is not None:
            bias = _four(effect.bias, shape)
            return Structure(shape, rest=rest, bias=bias, fill=effect.fill), None
        if effect.fill <= NOTHING and found.covers():
            return found, None
        exact = Structure(shape, rest=rest, fill=effect.fill)
        return exact, strict if effect.fill <= NOTHING else None

    def place(self, trace: Trace) -> CallPlace:
        """Return the user's line of the product with the values, and its module."""
        site = _site(self.product) or ("", 0)
        modules = set(trace.own_modules.values())
        names = [part for part in _parts(self.product) if part in modules or ".*" in part]
        return CallPlace(*site, names[-1] if names else "")

    def note(self, trace: Trace, reason: str) -> None:
        """Note that the matrix of scores is used, and why."""
        q, k = (self.scores[0].invars[side].aval for side in (0, 1))
        note_call(trace, q, k, "full", reason, place=self.place(trace))


def _keeps_last(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether the last two dims are the same, and all elements are there once."""
    return before[-2:] == after[-2:] and math.prod(before) == math.prod(after)


def _swaps_last(eqn: Any) -> bool:
    """Return whether an equation transposes the last two dims."""
    order = eqn.params.get("permutation", ()) if eqn.primitive.name == "transpose" else ()
    return order[-2:] == (len(order) - 1, len(order) - 2) and tuple(order[:-2]) == tuple(
        range(len(order) - 2)
    )


def _of_one_dtype(*arrays: jax.Array) -> list[jax.Array]:
    dtype = jnp.result_type(*arrays)
    return [array.astype(dtype) for array in arrays]


def _four(node: Node, shape: tuple[int, ...]) -> Node:
    """Return a node of the softmax's shape as one of [batch, heads, queries, keys]."""
    if len(node.shape) == 4:
        return node
    params = {"new_sizes": shape, "dimensions": None, "sharding": None}
    return computed(jax.lax.reshape_p, params, (node,), jax.ShapeDtypeStruct(shape, node.dtype))


def _parts(eqn: Any) -> list[str]:
    return [part for part in str(eqn.source_info.name_stack).split("/") if part]


@contextlib.contextmanager
def _scopes(eqn: Any) -> Iterator[None]:
    """Name instructions as those of an equation are."""
    with contextlib.ExitStack() as stack:
        for part in _parts(eqn):
            stack.enter_context(jax.named_scope(part))
        yield


def _site(eqn: Any) -> tuple[str, int] | None:
    """Return the file and line of the user's code that an equation comes from."""
    traceback = eqn.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        if not frame.file_name.startswith(inside_prefixes()):
            return frame.file_name, frame.line_num
    running = user_site()  # what is traced is a function of torch
    return None if running is None else running[:2]


def _at(eqn: Any) -> str:
    site = _site(eqn)
    return "" if site is None else f" at {site[0]}:{site[1]}"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nan_unless_seen(
    added: bool, out: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array
) -> jax.Array:
    """Return NaN for queries that see no key, as a softmax of minus infinity is.

    The gradient is that of such a softmax, too: NaN for each value, and for queries and keys unless
    the scores were replaced.
    """
    del added, q, k, v
    return jnp.where(seen, out, jnp.nan)


def _nan_forward(added: bool, out: Any, q: Any, k: Any, v: Any, seen: Any) -> Any:
    return _nan_unless_seen(added, out, q, k, v, seen), (q, k, v, seen)


def _nan_backward(added: bool, saved: Any, grad: Any) -> Any:
    q, k, v, seen = saved
    every = seen.all(2, keepdims=True)
    wanted = (seen, every) if added else (True, True)
    d_q, d_k, d_v = (
        jnp.where(defined, jnp.zeros_like(x), jnp.nan)
        for defined, x in zip((*wanted, every), (q, k, v), strict=True)
    )
    return jnp.where(seen, grad, 0), d_q, d_k, d_v, None


_nan_unless_seen.defvjp(_nan_forward, _nan_backward)
