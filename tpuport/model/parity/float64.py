"""Eager PyTorch in float64, whatever dtypes its code asks for, and with rounding errors put in."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tpuport.tracing.core.precision_seen import draws

_WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float64: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}
# The port holds 64-bit numbers in 32 bits.
_AS_HELD = {torch.float64: torch.float32, torch.complex128: torch.complex64}
# It writes these arguments, the running statistics, which its schema does not say.
_WRITES_UNSAID = {torch.ops.aten.native_batch_norm.default: (3, 4)}
_SWEEP = 64
# Sums of numbers in any dtype are in float32 at least, and lose a few last bits of what they add.
_SUMS_ROUND = 2 * torch.finfo(torch.float32).eps


class Float64(TorchDispatchMode):
    """A mode in which eager torch computes in float64 and sees the dtypes that it expects.

    Each storage of floating numbers has a twin in float64, complex ones that of their parts. Every
    op runs on the twins too, and what the code sees are the twins' values, rounded. So casts in the
    code lose nothing, and views, in-place writes and the backward pass need no rules of their own.
    If something else has written to a storage (numpy, an extension), its values are taken over.

    Args:
        errors: Put in rounding errors of this many times the size that the dtypes have.
        seed: The seed of their random signs and sizes.
        as_held: Whether float64 has the errors of the 32 bits that the port holds it in. Integers
            that come of float64 are to be eager's own, so for them it has those of 64.

    Attributes:
        errors: As given.
        narrow: Ops that exist only in the dtype that they were called in, with torch's reason.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, errors: float = 0.0, seed: int = 0, *, as_held: bool = True) -> None:
        super().__init__()
        self._as_held = _AS_HELD if as_held else {}
        self.narrow: dict[str, str] = {}
        self.errors = errors
        self._random = torch.Generator().manual_seed(seed)
        self._twins: dict[tuple[int, torch.dtype], tuple[StorageWeakRef, torch.Tensor]] = {}

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's value in float64; a tensor of integers as it is."""
        with _aside():
            return self._twin(tensor).clone() if _is_wide(tensor) else tensor.detach().clone()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view or draws(func):
            return func(*args, **kwargs)
        with _aside():
            leaves, spec = tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            casts = bool(tensors) and any(_is_wide_dtype(leaf) for leaf in leaves)
            floats = (casts or any(map(_is_wide, tensors))) and not any(map(_is_memory, leaves))
            wide = self._run_wide(func, leaves, spec) if floats else None
        result = func(*args, **kwargs)
        if wide is None:
            return result
        with _aside():
            for index in _written(func, leaves, spec):
                self._show(leaves[index])
            return self._settled(result, wide[0], tensors)

    # -- the twins ---------------------------------------------------------------------------------

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the twin of a tensor, as a view of the storage's twin."""
        if tensor.is_conj():
            return self._twin(tensor.conj()).conj()
        if tensor.is_neg():
            flipped = torch.ops.aten._neg_view.default
            return flipped(self._twin(flipped(tensor)))
        if tensor.is_complex():
            return torch.view_as_complex(self._twin(torch.view_as_real(tensor)))
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.itemsize
        key = (storage._cdata, tensor.dtype)
        known = self._twins.get(key)
        if known is None or known[0].expired() or known[1].numel() != count:
            plain = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (count,), (1,))
            flat = plain.to(_WIDE[tensor.dtype], copy=True)
            self._remember(key, storage, flat)
            return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        twin = known[1].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        seen = tensor.detach()
        rounded = twin.to(tensor.dtype)
        if torch.equal(rounded, seen):  # one pass; what follows takes several, and is for NaN too
            return twin
        same = (rounded == seen) | ((rounded != rounded) & (seen != seen))
        if not bool(same.all()):
            twin.copy_(torch.where(same, twin, seen.to(twin.dtype)))
        return twin

    def _remember(self, key: Any, storage: torch.UntypedStorage, flat: torch.Tensor) -> None:
        if len(self._twins) % _SWEEP == 0:
            for old in [k for k, (ref, _) in self._twins.items() if ref.expired()]:
                del self._twins[old]
        self._twins[key] = StorageWeakRef(storage), flat

    def _take(
        self, tensor: torch.Tensor, wide: torch.Tensor, held: Collection[int] | None = None
    ) -> None:
        """Make `wide` the value of a new tensor.

        Args:
            tensor: The tensor.
            wide: The value, which becomes the twin if it lies in memory as the tensor does.
            held: The memory that belongs to others; None if `wide` may be anybody's.
        """
        if tensor.is_complex():
            seen, value = (torch.view_as_real(one.resolve_conj()) for one in (tensor, wide))
            self._take(seen, value)
            return
        tensor.copy_(wide)
        if not _is_wide(tensor):
            return
        storage = tensor.untyped_storage()
        count = _bytes(tensor) // tensor.itemsize
        if held is not None and _address(wide) not in held and _lies_as(wide, tensor, count):
            flat = torch.empty(0, dtype=wide.dtype).set_(wide.untyped_storage(), 0, (count,), (1,))
            self._remember((storage._cdata, tensor.dtype), storage, flat)
            return
        flat = torch.zeros(count, dtype=_WIDE[tensor.dtype])
        flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(wide)
        self._remember((storage._cdata, tensor.dtype), storage, flat)

    # -- one op ------------------------------------------------------------------------------------

    def _run_wide(self, func: Any, leaves: list[Any], spec: Any) -> tuple[Any] | None:
        """Run an op on the twins; None if it exists only in the dtypes that it was called in."""
        given = [self._twin(leaf) if _is_wide(leaf) else _widened(leaf) for leaf in leaves]
        try:
            if not self.errors:
                return (_called(func, given, spec),)
            return (self._run_with_errors(func, leaves, given, spec),)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            self.narrow.setdefault(str(func), str(error).partition("\n")[0])
            return None

    def _run_with_errors(self, func: Any, seen: list[Any], given: list[Any], spec: Any) -> Any:
        """Run an op on the twins as an exact result with errors of rounding.

        In a sum of many numbers, each may be lost up to its own last bit, and a mean that is taken
        off moves all results alike. Errors of that size cannot be seen in the result of an op of
        float32 on CPU, which may sum in float64.
        """
        copies = [_alone(leaf) for leaf in seen]
        widened = [_alone(leaf, widen=True) for leaf in seen]
        once = tree_leaves(_called(func, copies, spec))
        exact = tree_leaves(_called(func, widened, spec))
        written = _written(func, seen, spec)
        made = [(copies[i], widened[i]) for i in written]
        made += zip(once, exact, strict=True)
        if all(self._fits(a, b) for a, b in made):
            return _called(func, given, spec)
        sums: list[int] = []
        if torch.Tag.pointwise not in func.tags:
            sums = [i for i, leaf in enumerate(seen) if _is_wide(leaf) and i not in written]
            given = [self._summed(v, seen[i]) if i in sums else v for i, v in enumerate(given)]
        results, shape = tree_flatten(_called(func, given, spec))
        own = {_address(given[i]) for i in written}
        for i in written:
            given[i].copy_(self._rounded(given[i], copies[i], widened[i]))
        return tree_unflatten(
            [
                self._rounded(v, a, b, moves=bool(sums))
                if _is_wide(v) and _address(v) not in own
                else v
                for v, a, b in zip(results, once, exact, strict=True)
            ],
            shape,
        )

    def _summed(self, twin: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return _but_infinities(twin, twin + twin.abs() * self._sum_error(seen))

    def _sum_error(self, seen: torch.Tensor) -> float:
        sign = 2.0 * float(torch.randint(2, (), generator=self._random)) - 1.0
        wide = self._held(seen) in (torch.float64, torch.complex128)
        return sign * self.errors * (4 * self._unit(seen) if wide else _SUMS_ROUND)

    def _held(self, tensor: torch.Tensor) -> torch.dtype:
        return self._as_held.get(tensor.dtype, tensor.dtype)

    def _fits(self, seen: Any, exact: Any) -> bool:
        """Return whether the dtype that a result is held in has its exact value."""
        if not _is_wide(seen):
            return True
        rounded = exact.to(self._held(seen)).to(exact.dtype)
        return bool(((rounded == exact) | (exact != exact)).all())

    def _unit(self, tensor: torch.Tensor) -> float:
        """Return the largest relative error of rounding to the dtype that a tensor is held in."""
        return torch.finfo(self._held(tensor)).eps / 2

    def _rounded(
        self, made: torch.Tensor, once: torch.Tensor, exact: torch.Tensor, *, moves: bool = False
    ) -> torch.Tensor:
        """Return a result with errors: of its own dtype, and of the size that the op made."""
        if not made.numel():
            return made
        error = (once.to(exact.dtype) - exact).abs()
        size = float(error.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())
        first, second = (
            torch.rand(made.shape, generator=self._random, dtype=torch.float64) * 2 - 1
            for _ in "12"
        )
        moved = made + (made * first * self._unit(once) + second * size) * self.errors
        finite = made[made.isfinite()].abs()
        if moves and finite.numel():
            # Of a few huge elements, such as those of a mask, the median knows nothing.
            moved = moved + finite.median() * self._sum_error(once)
        return _but_infinities(made, moved)

    def _show(self, tensor: torch.Tensor) -> None:
        """Give a tensor that an op wrote to the values of its twin, which has them as in memory."""
        if tensor.is_conj():
            self._show(tensor.conj())
            return
        if tensor.is_neg():
            self._show(torch.ops.aten._neg_view.default(tensor))
            return
        if tensor.is_complex():
            self._show(torch.view_as_real(tensor))
            return
        known = self._twins.get((tensor.untyped_storage()._cdata, tensor.dtype))
        # The op may have put another storage or size in.
        if known is not None and known[1].numel() * tensor.itemsize == _bytes(tensor):
            place = (tensor.size(), tensor.stride(), tensor.storage_offset())
            tensor.copy_(known[1].as_strided(*place))

    def _settled(self, result: Any, wide: Any, inputs: list[torch.Tensor]) -> Any:
        """Return the result that the code sees, after giving it the values of the twins."""
        owned = {_address(tensor) for tensor in inputs}
        twins = (self._twins.get((_address(one), one.dtype.to_real())) for one in inputs)
        held = {_address(twin[1]) for twin in twins if twin is not None}
        seen, spec = tree_flatten(result)
        made = []
        for one, value in zip(seen, tree_leaves(wide), strict=True):
            if not isinstance(one, torch.Tensor):
                made.append(value)
                continue
            if not _has_storage(one) or _address(one) in owned:
                made.append(one)
                continue
            if one.shape != value.shape or 0 in one.stride():
                one = torch.empty(value.shape, dtype=one.dtype)
            self._take(one, value, held)
            held.add(_address(value))
            made.append(one)
        return tree_unflatten(made, spec)


def _but_infinities(made: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """Return a result with errors, but for what is infinite, as in a mask: that has none."""
    return torch.where(made.isfinite(), moved, made)


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Run torch in the block without the modes that are active."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _is_wide_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _WIDE


def _widened(value: Any) -> Any:
    return _WIDE[value] if _is_wide_dtype(value) else value


def _has_storage(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return (kind is torch.Tensor or kind is torch.nn.Parameter) and (
        tensor.layout is torch.strided and tensor.device.type == "cpu"
    )


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _WIDE and _has_storage(value)


def _lies_as(wide: torch.Tensor, tensor: torch.Tensor, count: int) -> bool:
    """Return whether a wide value lies in its memory as a tensor does in its own, of that size."""
    places = [(one.stride(), one.storage_offset()) for one in (wide, tensor)]
    is_whole = _has_storage(wide) and _bytes(wide) == count * wide.itemsize
    return wide.dtype == _WIDE[tensor.dtype] and is_whole and places[0] == places[1]


def _is_memory(value: Any) -> bool:
    return isinstance(value, (torch.UntypedStorage, torch.TypedStorage))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if _has_storage(tensor) else id(tensor)


def _alone(value: Any, *, widen: bool = False) -> Any:
    """Return a copy of a tensor, in float64 if asked for; a dtype likewise."""
    if isinstance(value, torch.Tensor):
        made = value.detach().clone()
        return made.to(_WIDE[value.dtype]) if widen and _is_wide(value) else made
    return _widened(value) if widen else value


def _called(func: Any, leaves: list[Any], spec: Any) -> Any:
    args, kwargs = tree_unflatten(leaves, spec)
    return func(*args, **kwargs)


def _written(func: Any, leaves: list[Any], spec: Any) -> list[int]:
    """Return which leaves of the arguments an op writes to: tensors of floating numbers."""
    if func not in _WRITES_UNSAID and not func._schema.is_mutable:
        return []
    numbers = [i if _is_wide(leaf) else None for i, leaf in enumerate(leaves)]
    args, kwargs = tree_unflatten(numbers, spec)
    if func in _WRITES_UNSAID:
        found = [args[i] for i in _WRITES_UNSAID[func]]
    else:
        named = zip(func._schema.arguments, args, strict=False)
        found = [value for one, value in named if _writes_to(one)]
        found += [
            kwargs[one.name]
            for one in func._schema.arguments
            if _writes_to(one) and one.name in kwargs
        ]
    return [i for i in tree_leaves(found) if i is not None]


def _writes_to(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
