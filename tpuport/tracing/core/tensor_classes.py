"""Traced tensors of a class of the user's, as `Tensor.as_subclass` makes them.

A class that adds Python attributes and methods is joined with the traced tensor's: one of both is
what user code holds, and a plain traced tensor with the same state is what the program computes
with. Torch functions reach the class's own `__torch_function__`, as in eager.
"""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from tpuport.foundation.pytree.tensor_classes import OfClass, is_class_of_tensors
from tpuport.tracing.core.as_subclass import makes
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.set_attributes import SetAttributes
from tpuport.tracing.core.tensor import TracedTensor, meta_of, to_cpu, view_of
from tpuport.tracing.core.view_steps import VIEWS, ViewStep

# What a traced tensor keeps for itself: in its class, and from its construction on.
OWN = frozenset(vars(TracedTensor)) | frozenset(
    "_storage _chain _cached _cached_version _cached_region _own_flow _detached _is_leaf _is_given"
    " _stopped _env _is_param _left_grad _hooks _hooked _unhooked _stream _class_seen".split()
)
_DISABLED = torch._C._disabled_torch_function_impl
# What the tracer reads of a tensor; a class that answers otherwise would change what it computes.
_READ = frozenset(
    "__class__ __dict__ __getattribute__ __getattr__ __setattr__ __torch_dispatch__ size dim numel"
    " nelement stride storage_offset is_contiguous untyped_storage requires_grad is_leaf grad_fn"
    " data itemsize element_size layout is_floating_point is_complex __bool__ _version"
    " resolve_conj is_inference __init_subclass__ __slots__ view_as".split()
)
# Of these, classes have methods that ask torch in another way, which is looked at.
_ASKED = ("shape", "ndim", "dtype", "device")


# Where a tensor keeps what it has; classes of the user's show a part of it as `__dict__`.
_STATE_OF: Any = vars(torch.Tensor)["__dict__"]


def state_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return all that a tensor has, where its class shows user code a part of it."""
    return _STATE_OF.__get__(tensor)


class _OfClass(OfClass, TracedTensor):
    """The part of a joined class that is the traced tensor's."""

    _kind: type[torch.Tensor]

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportMissingSuperCall]
        """Do nothing: the tensor is made, and a class's own `__init__` ends here."""

    @property
    def __class__(self) -> type[torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]  (nobody sets it)
        """Return the class that user code sees."""
        return type(self)._kind

    def _shown(self) -> dict[str, Any]:
        """Return what user code sees as `__dict__`: the attributes that it has set."""
        return SetAttributes(self)

    def _take_shown(self, held: dict[str, Any]) -> None:
        """Set what user code gives as `__dict__`, without what a traced tensor keeps in its own."""
        self._set_attributes({name: held[name] for name in held if name not in OWN})

    def _class_seen_by_code(self) -> type[torch.Tensor]:
        """Return the class that user code sees."""
        return type(self)._kind

    def _plain_tensor(self) -> TracedTensor:
        """Return the plain tensor with the same state; made anew after a change of shape."""
        core, held = state_of(self)["_class_seen"]
        if core is None or held != _layout(self):
            with torch._C.DisableTorchFunctionSubclass():
                core = TracedTensor(self._storage, self._chain, meta_of(self))
                _join(self, core)
        return core

    def _attributes_set(self) -> dict[str, Any]:
        """Return the attributes that the user's code has set."""
        return {name: value for name, value in state_of(self).items() if name not in OWN}

    def _set_attributes(self, held: dict[str, Any]) -> None:
        """Set these attributes, and delete others."""
        state = state_of(self)
        for name in self._attributes_set():
            del state[name]
        for name in held:
            _refuse_name(type(self)._kind, name)
        state.update(held)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Return the tensor without its gradient; assignment keeps the gradient."""
        # A class's own `detach` has no part in it.
        return torch.Tensor.detach(self)

    @data.setter
    def data(  # pyright: ignore[reportIncompatibleMethodOverride]  (stubs name it otherwise)
        self, value: torch.Tensor
    ) -> None:
        TracedTensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a CPU tensor of the class or, while tracing, the tensor itself."""
        made = super().cpu(*args, **kwargs)
        return made if made is self else self._on_host()

    def _on_host(self) -> torch.Tensor:
        made = to_cpu(self).as_subclass(type(self)._kind)
        vars(made).update(self._attributes_set())
        return made

    def __copy__(self) -> torch.Tensor:
        """Return a tensor of the class on the same memory, with the same attributes."""
        return self._copied(TracedTensor.__copy__, self._attributes_set())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a copy of the class, with copies of the attributes."""
        memo[id(self)] = copied = self._copied(lambda core: TracedTensor.__deepcopy__(core, memo))
        vars(copied).update(copy.deepcopy(self._attributes_set(), memo))
        return copied

    def _copied(
        self, copied: Callable[[TracedTensor], torch.Tensor], held: dict[str, Any] | None = None
    ) -> torch.Tensor:
        kept, core = self._attributes_set(), self._plain_tensor()
        self._set_attributes({})
        try:
            made = copied(core).as_subclass(type(self)._kind)
        finally:
            self._set_attributes(kept)
        vars(made).update(held or {})
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._on_host().__reduce_ex__(protocol)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return (
            torch.Tensor.size(tensor),
            torch.Tensor.stride(tensor),
            torch.Tensor.storage_offset(tensor),
        )


def _join(tensor: TracedTensor, core: TracedTensor) -> None:
    """Let two tensors, one of them of a class, have one state."""
    state = state_of(tensor) or state_of(core)
    state["_class_seen"] = (core, _layout(core))
    for one in (tensor, core):
        _STATE_OF.__set__(one, state)


@makes("view")
def made_of_class(tensor: TracedTensor, kind: type[torch.Tensor]) -> TracedTensor:
    """Return another view of a tensor, of a class: what `as_subclass` gives.

    Raises:
        PortError: the class does more than a traced tensor can have with it.
    """
    with torch._C.DisableTorchFunctionSubclass():
        meta = meta_of(tensor)
        step = VIEWS[torch.ops.aten.alias.default](meta, meta)
        assert isinstance(step, ViewStep)
        alias = view_of(tensor, step, meta)
        alias._extents = tensor._extents
    return alias if kind is torch.Tensor else adopt(alias, kind)


@makes("adopt")
def adopt(core: TracedTensor, kind: type[torch.Tensor]) -> TracedTensor:
    """Return a tensor of a class with the state of a plain one that nobody else holds."""
    meta = meta_of(core)
    made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        joined(kind),
        meta.size(),
        strides=meta.stride(),
        storage_offset=torch.Tensor.storage_offset(core),
        dtype=meta.dtype,
        device="cpu",  # pyright: ignore[reportArgumentType]  (torch takes a name)
        requires_grad=False,
    )
    _join(made, core)
    with torch._C.DisableTorchFunctionSubclass():
        for name in _ASKED:
            if getattr(made, name) != getattr(core, name):
                raise refused(kind, f"whose {name!r} differs from torch's")
    return made


@functools.lru_cache(maxsize=1024)
def joined(kind: type[torch.Tensor]) -> type[TracedTensor]:
    """Return the class of traced tensors that are of a class of the user's.

    Raises:
        PortError: the class does more than a traced tensor can have with it.
    """
    if issubclass(kind, OfClass):
        kind = kind._kind  # type: ignore[attr-defined]
    if reason := _unfit(kind):
        raise refused(kind, reason)
    disabled = kind.__torch_function__ is _DISABLED

    def torch_function(
        cls: Any, func: Any, seen: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return kind.__torch_function__(func, classes_seen(seen), args, kwargs or {})

    def fill(space: dict[str, Any]) -> None:
        space["_kind"] = kind
        space["__module__"], space["__qualname__"] = kind.__module__, kind.__qualname__
        space["__doc__"] = kind.__doc__
        space["__torch_function__"] = _DISABLED if disabled else classmethod(torch_function)
        for name in ("__class__", "__reduce_ex__"):
            space[name] = vars(_OfClass)[name]
        # Those of parameters would come before those of traced tensors.
        for name in ("__deepcopy__", "__repr__"):
            if getattr(kind, name) is getattr(torch.nn.Parameter, name):
                space[name] = getattr(_OfClass, name)
        space["__dict__"] = property(_OfClass._shown, _OfClass._take_shown)
        space["__new__"] = lambda cls, *args, **kwargs: kind.__new__(kind, *args, **kwargs)

    return types.new_class(kind.__name__, (kind, _OfClass), exec_body=fill)  # type: ignore[return-value]


def classes_seen(found: Any) -> tuple[type, ...]:
    """Return the classes that `__torch_function__` gets in eager, each once, in eager's order."""
    seen: list[type] = []
    for one in found:
        kind = one._kind if issubclass(one, _OfClass) else one
        if kind not in seen:
            at = next((i for i, k in enumerate(seen) if issubclass(kind, k)), len(seen))
            seen.insert(at, kind)
    return tuple(seen)


def overrides(kind: type) -> bool:
    """Return whether functions of torch's are to pass a method of a class of tensors now."""
    # Sizes and the like come with the class also from where its method has called them.
    if not torch._C._is_torch_function_enabled():
        return False
    return is_class_of_tensors(kind) and kind.__torch_function__ is not _DISABLED  # type: ignore[attr-defined]


def _unfit(kind: type[torch.Tensor]) -> str | None:
    """Return why tensors of a class cannot be traced, or None."""
    if not is_class_of_tensors(kind):
        return "which takes torch's operations itself"
    if type(kind) not in (type(torch.Tensor), type(torch.nn.Parameter)):
        return f"whose class is a {type(kind).__name__}"
    bases = kind.__mro__[: kind.__mro__.index(torch.Tensor)]
    for base in (one for one in bases if one is not torch.nn.Parameter):
        for name in vars(base):
            own = name in OWN and not hasattr(torch.Tensor, name)
            if name in _READ or own or name in vars(OfClass).keys() - vars(object).keys() - _FREE:
                return f"which defines {name!r}, a name that the tracer itself uses"
            if found := _names_in(vars(base)[name]) & _STATE:
                return f"whose {name} uses {min(found)!r}, a name that the tracer itself uses"
    return None


# The attributes in which a traced tensor keeps its state.
_STATE = frozenset(n for n in OWN if n.startswith("_") and not n.endswith("_")) - {"_is_param"}


def _names_in(member: Any) -> frozenset[str]:
    """Return the names that the code of a method or property reads or sets."""
    parts = [member, *(getattr(member, name, None) for name in ("__func__", "fget", "fset"))]
    codes = (getattr(part, "__code__", None) for part in parts)
    return frozenset(name for code in codes if code is not None for name in code.co_names)


_FREE = frozenset({"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__"})


def _refuse_name(kind: type, name: str) -> None:
    if name in OWN:
        raise refused(kind, f"with an attribute {name!r}, a name that the tracer itself uses")


def refused(kind: type, reason: str) -> Exception:
    """Return the error for a class whose tensors cannot be traced."""
    return port_error(
        f"a tensor that depends on the program's inputs is made a {kind.__name__}, {reason}",
        code="TPU106",
        remedy=(
            "compute with plain tensors; if the line is not yours, leave the class that"
            " calls it to eager PyTorch: `tpuport run --eager NAME`"
        ),
    )
