"""The inputs and outputs of a trace: traced tensors made of arrays, and arrays taken from them."""

from collections.abc import Iterator
from typing import Any

import jax
import torch

from tpuport.foundation import pytree
from tpuport.foundation.pytree.children import Children, children
from tpuport.foundation.pytree.tensor_classes import class_seen, is_class_of_tensors
from tpuport.tracing.core import leaf_flags, sym_numbers
from tpuport.tracing.core.arguments import Unsized
from tpuport.tracing.core.context import KeyStream, Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.host_tape import Opaque
from tpuport.tracing.core.measured_time import MEASURED, lasting
from tpuport.tracing.core.storage import Flow, Storage
from tpuport.tracing.core.tensor import SHOWN, TracedTensor, flow_seen, meta_of
from tpuport.tracing.core.tensor_classes import adopt, state_of
from tpuport.tracing.core.values import held_of, value_of
from tpuport.tracing.dynamic_shapes.extents import extents_of, strip
from tpuport.tracing.guards.outside_tensors import written_outside
from tpuport.tracing.session.growing_arguments import sized
from tpuport.tracing.state.module_state import StateTree
from tpuport.tracing.state.request import TraceRequest
from tpuport.tracing.state.tensor_attributes import attributes_set_on, refuse_left_attributes


def program_leaves(leaves: list[Any], *, wide: bool) -> tuple[list[Any], list[Any]]:
    """Return the array of each result, and its meta tensor (of a number its symbolic type).

    A result whose size depends on data gives the padded array with its sizes, and an `Unsized`.

    Args:
        leaves: The results.
        wide: Whether they keep 64 bits; if not, one that does not fit in 32 raises at the call.
    """
    value = held_of if wide else value_of
    number = sym_numbers.exact_value if wide else sym_numbers.node_value
    values: list[Any] = []
    metas: list[Any] = []
    for leaf in leaves:
        extents = extents_of(leaf)
        if isinstance(leaf, sym_numbers.SYMBOLIC):
            values.append(number(leaf))
            metas.append(type(leaf))
        elif extents:
            values.append((value(strip(leaf)), [node.value for node in extents.values()]))
            is_list = getattr(leaf, "_is_list", False)
            metas.append(Unsized(leaf.dtype, tuple(extents), leaf.requires_grad, is_list))
        else:
            values.append(value(leaf))
            metas.append(meta_of(leaf, like=True))
            if getattr(leaf, "_or_number", False):
                metas[-1]._or_number = True
    return values, metas


def is_of_text(what: Any) -> bool:
    """Return whether a text, or the message of an error, has the text of a traced value in it."""
    return any(str.__contains__(str(what), mark) for mark in (SHOWN, "<traced "))


def refuse_passing(trace: Trace, result: pytree.TreeSpec, state: StateTree | None) -> None:
    """Refuse what is of this call alone and outlives the trace: text of its values, and times.

    Args:
        trace: the trace.
        result: the structure of the result.
        state: the state of the module after the call.

    Raises:
        PortError: the result or an attribute holds such a value.
    """
    _refuse_text(trace, result, state)
    for name, value in _held(result, state):
        if isinstance(value, MEASURED):
            raise lasting(f"{name} holds", value)
        if isinstance(value, Opaque):
            raise port_error(
                f"{name} holds a state of the host's generators",
                code="TPU404",
                remedy="set it again within the call, or ask for it outside of it",
            )


def _held(result: pytree.TreeSpec, state: StateTree | None) -> Iterator[tuple[str, Any]]:
    """Yield the Python values that outlive a trace, with words for where they are."""
    for value in pytree.statics_of(result):
        yield "the result", value
    for name, value in ({} if state is None else state.values).items():
        yield f"the attribute {name!r}", value


def _refuse_text(trace: Trace, result: pytree.TreeSpec, state: StateTree | None) -> None:
    """Refuse text of a traced value, also as a name or key of the state."""
    if trace.recorder.text is None:
        return
    names = [] if state is None else [*state.values, *state.leaves]
    if is_of_text(names):
        raise port_error(
            "the call gives state a name or key that depends on the program's inputs",
            code="TPU103",
            remedy="keep what the name is made of as a Python number that does not change at each"
            " call, or use a tensor with a dim for the names",
            place=trace.recorder.text,
        )
    for name, value in _held(result, state):
        if isinstance(value, str) and is_of_text(value):
            raise port_error(
                f"{name} holds the text of a tensor or number that depends on the program's inputs",
                code="TPU311",
                remedy="return the value itself, and make the text after the call",
                place=trace.recorder.text,
            )


def state_tensor(
    trace: Trace, tensor: torch.Tensor, value: jax.Array, late: bool = False
) -> TracedTensor:
    """Make a traced tensor for a tensor of the model's state, with the attributes set on that.

    Args:
        trace: the running trace.
        tensor: the model's.
        value: its value in the program.
        late: whether it is a parameter that the call makes require grad.
    """
    flow = flow_seen(tensor.requires_grad)
    # The tensor itself answers what is asked of a meta tensor, and making one for each takes time.
    whole = not isinstance(tensor, TracedTensor) and not tensor.storage_offset()
    like = tensor if whole else meta_of(tensor)
    made = TracedTensor(Storage(value, trace), (), like, value, flow)
    made._is_leaf, made._is_given = tensor.is_leaf, True
    if is_class_of_tensors(type(tensor)):
        made = adopt(made, class_seen(tensor))
    if tensor.__dict__:
        state_of(made).update(attributes_set_on(tensor))
    if isinstance(tensor, torch.nn.Parameter):
        made._is_param = True  # type: ignore[attr-defined]  (isinstance(x, nn.Parameter) asks for this)
    if late:
        leaf_flags.set_ended(made)
    return made


def traced_arguments(
    trace: Trace, request: TraceRequest, host: frozenset[int]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any], dict[int, Any]]:
    """Make the traced call's own arguments; return them with their leaves and containers."""
    made: list[Any] = []
    for index, (value, meta) in enumerate(zip(request.leaves, request.metas, strict=True)):
        if isinstance(meta, type):
            generator: Any = meta()
            trace.generators[generator._cdata] = KeyStream(value)
            made.append(generator)
        elif index in host and index in request.known_leaves:
            made.append(request.host_leaf(index))
        else:
            flow = Flow.SEEN if meta.requires_grad else Flow.HIDDEN
            argument = TracedTensor(Storage(value, trace), (), meta, value, flow)
            argument._is_leaf, argument._is_given = meta.is_leaf, True
            trace.takes_int32 |= meta.dtype is torch.int32
            if meta.requires_grad:
                trace.add_leaf(argument)
            made.append(argument)
    containers: dict[int, Any] = {}
    spec = request.spec
    if request.lengths is not None:
        spec = sized(trace, request.lengths, made, spec, request.leaves[-1])
    args, kwargs = pytree.unflatten(spec, made, containers)
    trace.arguments = set(map(id, made))
    return args, kwargs, made, containers


def refuse_lost_effects(trace: Trace, own: StateTree | None, made: list[Any], result: Any) -> None:
    """Refuse what a call does beside its result and its own state, which would be lost.

    Args:
        trace: The trace of the call.
        own: The state that belongs to the module.
        made: The call's arguments.
        result: What it returned.

    Raises:
        PortError: it wrote to another tensor, or set an attribute of an argument or result.
    """
    _refuse_foreign_writes(trace, own)
    refuse_left_attributes(result, made)


def _refuse_foreign_writes(trace: Trace, own: StateTree | None) -> None:
    """Refuse writes to tensors other than arguments and the module's own: they would be lost.

    Raises:
        PortError: the call wrote to another tensor (a global, or one in a closure).
    """
    if not trace.promoted:
        return
    owned = set(trace.made) | {
        t.untyped_storage()._cdata
        for t in (() if own is None else own.leaves.values())
        if isinstance(t, torch.Tensor) and not isinstance(t, TracedTensor)
    }
    for key, (tensor, storage) in trace.promoted.items():
        # Reading at a traced place promotes a tensor, too.
        if key not in owned and storage.version:
            raise written_outside(tensor)


def refuse_writes_in_closures(closed: list[tuple[Any, Children]]) -> None:
    """Refuse writes to lists and dicts that local functions of the module, such as hooks, refer to.

    The trace has a copy of one that holds tensors or modules, so a write would be lost.

    Args:
        closed: The copies, and what they held before the call.

    Raises:
        PortError: the call wrote to one.
    """
    for container, before in closed:
        if not children(container).is_same(before):
            raise port_error(
                "a call writes to a list or dict that a hook or local function has in its closure"
                " or default values",
                code="TPU406",
                remedy="keep it in an attribute of the module, or return what is written; under"
                " porting(), leave the class to eager PyTorch: --eager",
            )
