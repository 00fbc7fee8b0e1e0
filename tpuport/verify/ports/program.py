"""A program of jax run in float64, whatever dtypes its code asks for, with its values in between.

The jaxpr is interpreted equation by equation; calls, branches and loops are entered. Nothing is
compiled but single operations, which equal blocks share. Random numbers keep their dtypes, so a key
gives the same ones.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from tpuport.foundation.interop.scan_params import scan_counts
from tpuport.foundation.user_frames import CodePlace, is_inside
from tpuport.verify.ports.on_numpy import evaluate

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_ENTERED = {
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"),
}
_DRAWS = {
    *("random_bits", "random_seed", "random_wrap", "random_unwrap", "random_fold_in"),
    *("random_split", "threefry2x32", "rng_bit_generator", "random_clone"),
}
_IN_OWN_DTYPE = {"bitcast_convert_type", "pallas_call", "ffi_call", "pure_callback", "shard_map"}
# The same elements in another layout: the same value in between.
_MOVES = {"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "copy"}
_MOST_DIGITS = 9
_LIBRARIES = tuple(
    f"{os.sep}{name}{os.sep}" for name in ("flax", "equinox", "optax", "jaxtyping", "haiku")
)


@dataclass(frozen=True)
class Made:
    """One value in between.

    Attributes:
        op: The primitive.
        place: The user's innermost line; None where there is none.
        function: The function that the line is in.
        parents: The values that it was computed from, by their numbers.
        is_constant: Whether it depends on neither inputs nor weights.
    """

    op: str
    place: CodePlace | None
    function: str
    parents: tuple[int, ...]
    is_constant: bool


@dataclass
class ProgramRun:
    """What running a program gave.

    Attributes:
        out: The flat results.
        made: The values in between, in the order of execution, if they were recorded.
        values: Their arrays.
        masks: The random numbers of two values that meet other values, in the order of execution.
        narrow: Primitives that ran in their own dtype.
        ends: The number of each result among the values in between; None if it is none of them.
    """

    out: list[np.ndarray]
    made: list[Made]
    values: list[np.ndarray]
    masks: list[np.ndarray]
    narrow: list[str]
    ends: list[int | None]


def run(program: Any, args: Sequence[Any], *, wide: bool, record: bool = False) -> ProgramRun:
    """Run a closed jaxpr.

    Args:
        program: The closed jaxpr.
        args: Its flat arguments.
        wide: Whether to compute in float64.
        record: Whether to return the values in between.
    """
    made = _Interpreter(wide, record)
    with double(wide):
        outs = made.jaxpr(program.jaxpr, program.consts, made.cells(args))
        out = [_on_host(made.widened(one.value)) for one in outs]
        values, masks = map(_on_host, made.values), map(_on_host, made.masks)
        return ProgramRun(
            *(out, made.made, list(values), list(masks), sorted(made.narrow)),
            [one.node for one in outs],
        )


def run_compiled(program: Any, args: Sequence[Any]) -> list[np.ndarray]:
    """Return the flat results of a closed jaxpr as XLA compiles it."""
    return [_on_host(one) for one in jax.jit(core.jaxpr_as_fun(program))(*args)]


def double(wide: bool) -> Any:
    """Return a context in which jax has 64 bits, if `wide`."""
    return jax.enable_x64(wide or jax.config.jax_enable_x64)  # pyright: ignore


def _array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else np.asarray(value)


def _on_host(value: Any) -> np.ndarray:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value)


@dataclass(frozen=True)
class _Cell:
    """A value while the program runs: the number of what made it, and what it depends on."""

    value: Any
    node: int | None
    is_constant: bool
    is_drawn: bool


@dataclass
class _Interpreter:
    wide: bool
    record: bool
    made: list[Made] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)
    narrow: set[str] = field(default_factory=set)
    around: CodePlace | None = None
    seen: set[int] = field(default_factory=set)

    def cells(self, args: Sequence[Any]) -> list["_Cell"]:
        """Return the arguments of a program as cells."""
        return [_Cell(self.widened(_array(arg)), None, False, False) for arg in args]

    def widened(self, value: Any) -> Any:
        """Return a floating value in float64."""
        if not self.wide or not hasattr(value, "dtype"):
            return value
        to = _wide(value.dtype)
        return value if to is None or to == value.dtype else np.asarray(value).astype(to)

    def jaxpr(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[_Cell]) -> list[_Cell]:
        """Run a jaxpr on cells."""
        known: dict[Any, _Cell] = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            known[var] = _Cell(self.widened(const), None, True, False)

        def read(atom: Any) -> _Cell:
            if isinstance(atom, core.Literal):
                return _Cell(self._literal(atom.val), None, True, False)
            return known[atom]

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(atom) for atom in eqn.invars])
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _literal(self, value: Any) -> Any:
        dtype = getattr(value, "dtype", None)
        if not self.wide or dtype is None or _wide(dtype) != np.float64 or np.ndim(value):
            return self.widened(value)
        # The decimal that was written, of which the literal is a rounding.
        for digits in range(_MOST_DIGITS if dtype != np.float64 else 0):
            written = float(f"{float(value):.{digits}e}")
            if np.asarray(written).astype(dtype) == value:
                return np.asarray(written, np.float64)
        return self.widened(value)

    def _equation(self, eqn: Any, cells: list[_Cell]) -> list[_Cell]:
        name = eqn.primitive.name
        inner = next((eqn.params[key] for key in _CALLS if key in eqn.params), None)
        before = self.around
        self.around = _place(eqn)[0] or before
        try:
            if name in _ENTERED and inner is not None:
                closed = hasattr(inner, "consts")
                body, consts = (inner.jaxpr, inner.consts) if closed else (inner, ())
                return self.jaxpr(body, consts, cells)
            if name == "cond":
                index, *rest = cells
                body = eqn.params["branches"][int(index.value)]
                return self.jaxpr(body.jaxpr, body.consts, rest)
            if name == "scan":
                return self._scan(eqn, cells)
            return self._while(eqn, cells) if name == "while" else self._single(eqn, cells)
        finally:
            self.around = before

    def _single(self, eqn: Any, cells: list[_Cell]) -> list[_Cell]:
        name = eqn.primitive.name
        is_constant = all(c.is_constant for c in cells)
        # Numbers that depend on a key alone.
        drawn = name in _DRAWS or (
            any(c.is_drawn for c in cells) and all(c.is_drawn or c.is_constant for c in cells)
        )
        if not drawn:
            self._note_masks(cells)
        values = [c.value for c in cells]
        if drawn or not self.wide:
            outs = _bind(eqn, _narrowed(eqn, values))
        else:
            outs = self._in_float64(eqn, [self.widened(v) for v in values])
        return self._record(eqn, outs, cells, is_constant and not drawn, drawn)

    def _note_masks(self, cells: list[_Cell]) -> None:
        for cell in cells:
            if cell.is_drawn and cell.value.ndim and id(cell.value) not in self.seen:
                if not jnp.issubdtype(cell.value.dtype, jax.dtypes.prng_key):
                    self.seen.add(id(cell.value))
                    self.masks.append(cell.value)

    def _in_float64(self, eqn: Any, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "reduce_precision":
            return values
        if name not in _IN_OWN_DTYPE:
            params = _widened_params(eqn.params)
            found = evaluate(name, values, params)
            if found is not None:
                return [found]
            try:
                return _bind(eqn, values, params)
            except (TypeError, ValueError, NotImplementedError):
                pass  # it exists in its own dtype only
        if any(_wide(v.aval.dtype) is not None for v in (*eqn.invars, *eqn.outvars)):
            self.narrow.add(name)
        return [self.widened(v) for v in _bind(eqn, _narrowed(eqn, values))]

    def _is_cast_away(self, eqn: Any) -> bool:
        """Return whether this casts between floating dtypes, which are all float64 here."""
        atoms = (*eqn.invars, *eqn.outvars)
        return (
            self.wide
            and eqn.primitive.name == "convert_element_type"
            and all(_wide(atom.aval.dtype) == np.float64 for atom in atoms)
        )

    def _while(self, eqn: Any, cells: list[_Cell]) -> list[_Cell]:
        p = eqn.params
        a, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        test, body, carry = p["cond_jaxpr"], p["body_jaxpr"], cells[b:]
        while self.jaxpr(test.jaxpr, test.consts, [*cells[:a], *carry])[0].value:
            carry = self.jaxpr(body.jaxpr, body.consts, [*cells[a:b], *carry])
        return carry

    def _scan(self, eqn: Any, cells: list[_Cell]) -> list[_Cell]:
        p = eqn.params
        a, carried = scan_counts(p)
        b = a + carried
        carry, rounds = cells[a:b], range(p["length"])
        kept: dict[int, list[_Cell]] = {}
        for i in reversed(rounds) if p["reverse"] else rounds:
            xs = [_Cell(c.value[i], c.node, c.is_constant, c.is_drawn) for c in cells[b:]]
            outs = self.jaxpr(p["jaxpr"].jaxpr, p["jaxpr"].consts, [*cells[:a], *carry, *xs])
            carry, kept[i] = outs[: b - a], outs[b - a :]
        stacked = [[kept[i][k] for i in rounds] for k in range(len(eqn.outvars) - len(carry))]
        made = []
        for column in stacked:
            stack = np if all(isinstance(c.value, np.ndarray) for c in column) else jnp
            value = stack.stack([c.value for c in column])
            made += self._record(eqn, [value], column, all(c.is_constant for c in column), False)
        return [*carry, *made]

    def _record(
        self, eqn: Any, outs: list[Any], cells: list[_Cell], constant: bool, drawn: bool
    ) -> list[_Cell]:
        if eqn.primitive.name in _MOVES or self._is_cast_away(eqn):
            return [_Cell(outs[0], cells[0].node, constant, drawn)]
        made = []
        for out in outs:
            node = None
            if self.record and not jnp.issubdtype(out.dtype, jax.dtypes.prng_key):
                place, function = _place(eqn)
                parents = tuple(sorted({c.node for c in cells if c.node is not None}))
                node = len(self.made)
                # Where the equation itself has no line of the user's, that of the call around it.
                self.made.append(
                    Made(eqn.primitive.name, place or self.around, function, parents, constant)
                )
                self.values.append(self.widened(out))
            made.append(_Cell(out, node, constant, drawn))
        return made


def _wide(dtype: Any) -> Any:
    """Return the wide dtype of a floating one; None for any other."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if jnp.issubdtype(dtype, jnp.complexfloating) else None


def _widened_params(params: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _wide(value) or value if isinstance(value, (np.dtype, type)) else value
        for key, value in params.items()
    }


def _narrowed(eqn: Any, values: list[Any]) -> list[Any]:
    """Return the values in the dtypes that the equation was traced with."""
    found = []
    for var, value in zip(eqn.invars, values, strict=True):
        dtype = getattr(var.aval, "dtype", None)
        known = getattr(value, "dtype", None)
        cast = dtype is not None and known is not None and dtype != known
        value = jnp.asarray(value) if isinstance(value, np.ndarray) else value
        found.append(value.astype(dtype) if cast else value)
    return found


def _bind(eqn: Any, values: list[Any], params: dict[str, Any] | None = None) -> list[Any]:
    given = eqn.params if params is None else params
    values = [jnp.asarray(v) if isinstance(v, (np.ndarray, np.generic)) else v for v in values]
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(given))
    return list(out) if eqn.primitive.multiple_results else [out]


def _place(eqn: Any) -> tuple[CodePlace | None, str]:
    """Return the user's innermost line of an equation, and the function that it is in."""
    trace = eqn.source_info.traceback
    for frame in () if trace is None else trace.frames:
        file = frame.file_name
        if not is_inside(file) and not any(name in file for name in _LIBRARIES):
            return CodePlace.at(file, frame.line_num), frame.function_name
    return None, ""
