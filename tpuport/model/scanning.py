"""A loop over the first dim of tensors: `lax.scan` in a program, a Python loop in eager PyTorch."""

from collections.abc import Callable
from typing import Any

import jax
import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import UsageError
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.storage import Flow
from tpuport.tracing.core.tensor import meta_of, wrap
from tpuport.tracing.core.values import value_of

Body = Callable[[Any, Any], tuple[Any, Any]]


def scan(body: Body, carry: Any, xs: Any, *, remat: bool = False) -> tuple[Any, Any]:
    """Run `for x in xs: carry, y = body(carry, x)`, and stack all y.

    The body is traced and compiled once, however many rounds there are.

    Args:
        body: Must draw no random numbers and write only to tensors that it makes; the carry keeps
            its structure, shapes and dtypes.
        carry: Tensors in dicts, lists, tuples or dataclasses.
        xs: Tensors likewise, each (rounds, ...); a round gets them without that dim.
        remat: Compute a round's values again in the backward pass instead of keeping them.

    Returns:
        The carry after the last round, and all y, each (rounds, ...).

    Raises:
        UsageError: There is no round, or tensors differ in their number of rounds.
        PortError: In a program, the body breaks one of these conditions.
    """
    leaves, spec = pytree.flatten(xs, leaf=_is_tensor)
    counts = {len(leaf) for leaf in leaves}
    if len(counts) != 1 or 0 in counts:
        raise UsageError(
            f"scan over tensors of {sorted(counts)} rounds: expected one number, above 0"
        )
    trace = current()
    if trace is not None:
        return _Scan(trace, body, carry, remat).run(leaves, spec)
    each: list[list[torch.Tensor]] = []
    found: pytree.TreeSpec | None = None
    for number in range(counts.pop()):
        carry, y = body(carry, pytree.unflatten(spec, [leaf[number] for leaf in leaves]))
        parts, found = pytree.flatten(y, leaf=_is_tensor)
        each.append(parts)
    assert found is not None
    return carry, pytree.unflatten(
        found, [torch.stack(rounds) for rounds in zip(*each, strict=True)]
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class _Scan:
    """One `lax.scan` in a program."""

    def __init__(self, trace: Trace, body: Body, carry: Any, remat: bool) -> None:
        self.trace, self.body, self.remat = trace, body, remat
        self.carried, self.spec = pytree.flatten(carry, leaf=_is_tensor)
        self.metas = [meta_of(leaf) for leaf in self.carried]
        self.given: list[torch.Tensor] = []
        self.given_spec: pytree.TreeSpec | None = None
        self.y_spec: pytree.TreeSpec | None = None
        self.y_metas: list[torch.Tensor] = []
        # Where the number of the first failed check is kept, which the loop carries.
        self.failures = trace.error_code

    def run(self, leaves: list[torch.Tensor], spec: pytree.TreeSpec) -> tuple[Any, Any]:
        """Run the loop; return the final carry and all y."""
        self.given, self.given_spec = [meta_of(leaf[0]) for leaf in leaves], spec
        step = jax.checkpoint(self._step) if self.remat else self._step
        first = [value_of(leaf) for leaf in self.carried]
        code = None if self.failures is None else self.failures.value
        (last, code), ys = jax.lax.scan(step, (first, code), [value_of(leaf) for leaf in leaves])
        self._enter(code)
        return self._tensors(self.spec, last, self.metas), self._tensors(
            self.y_spec, ys, self.y_metas
        )

    def _tensors(self, spec: Any, values: list[jax.Array], metas: list[torch.Tensor]) -> Any:
        made = [
            wrap(value, meta.dtype, trace=self.trace, flow=Flow.SEEN)
            for value, meta in zip(values, metas, strict=True)
        ]
        return pytree.unflatten(spec, made)

    def _enter(self, code: jax.Array | None) -> None:
        if self.failures is not None and code is not None:
            self.failures.set(code)

    def _step(
        self, before: tuple[list[jax.Array], jax.Array | None], given: list[jax.Array]
    ) -> tuple[tuple[list[jax.Array], jax.Array | None], list[jax.Array]]:
        (carried, code), draws = before, self.trace.draws
        self._enter(code)
        state = self._tensors(self.spec, carried, self.metas)
        x = self._tensors(self.given_spec, given, self.given)
        with self.trace.recording() as effects:
            after, y = self._call(state, x)
        written = [s for s, _, _ in effects.before.values() if s is not self.failures]
        drew = any(a is not b for a, b in zip(self.trace.draws, draws, strict=True))
        if written or effects.wrote_on_host or drew:
            raise _refused("writes to tensors that it did not make, or draws random numbers")
        leaves, spec = pytree.flatten(after, leaf=_is_tensor)
        found = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves if _is_tensor(leaf)]
        wanted = [(tuple(meta.shape), meta.dtype) for meta in self.metas]
        if spec.key != self.spec.key or found != wanted:
            raise _refused(f"carries {wanted} into a round and {found} out of it")
        parts, self.y_spec = pytree.flatten(y, leaf=_is_tensor)
        self.y_metas = [meta_of(part) for part in parts]
        code = None if self.failures is None else self.failures.value
        return ([value_of(leaf) for leaf in leaves], code), [value_of(part) for part in parts]

    def _call(self, state: Any, x: Any) -> tuple[Any, Any]:
        explorer = self.trace.explorer
        if explorer is None:
            return self.body(state, x)
        return explorer.run_inside("scan", lambda: self.body(state, x), [state, x])


def _refused(what: str) -> Exception:
    return port_error(
        f"the body of a scan {what}",
        code="TPU104",
        remedy="return what changes as part of the carry, in the same shapes and dtypes",
    )
