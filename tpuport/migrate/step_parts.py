"""The parts of a training step as torch_xla's users write it: a loss, backward, an update."""

from dataclasses import dataclass, field

import libcst as cst
import libcst.matchers as m

from tpuport.migrate.project import ClassPlace
from tpuport.migrate.source_file import (
    SourceFile,
    argument,
    expression_of,
    keywords,
    own_attribute,
    statement_of,
)

_CORE = "torch_xla.core.xla_model"
_ENDS = {"torch_xla.sync", f"{_CORE}.mark_step", f"{_CORE}.reduce_gradients"}
_CLIPS = {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_"}
# How torch names torch_xla's device and process groups.
XLA_TEXTS = {"xla", "xla:0", "xla:1", "xla://"}
# What a loss must not hold: it would run once, while the program is traced, or end it.
_FORBIDDEN = (cst.Return, cst.Yield, cst.Await, cst.Del, cst.Global, cst.Nonlocal)


class NotMovedError(Exception):
    """Raised for a step that cannot be proved to be the same as a training step of tpuport.

    Args:
        node: The place that says so.
        reason: The reason.
    """

    def __init__(self, node: cst.CSTNode, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


@dataclass
class StepParts:
    """A method that takes one training step.

    Attributes:
        place: Its class.
        method: The method.
        loss: The statements that compute the loss.
        result: The name of the loss.
        optimizer: The attribute that holds the optimizer.
        clip: The largest norm of gradients, as written.
        returns: Whether the method returns the loss.
        helpers: Methods that it calls to update, and that hold nothing else.
    """

    place: ClassPlace
    method: cst.FunctionDef
    loss: list[cst.CSTNode] = field(default_factory=list)
    result: str = ""
    optimizer: str = ""
    clip: str | None = None
    returns: bool = False
    helpers: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        """Return the names of the method's arguments after `self`."""
        return [param.name.value for param in self.method.params.params[1:]]


def find_backward(method: cst.FunctionDef) -> tuple[int, str] | None:
    """Return where in a method's body a loss's `backward()` is, and the name of the loss."""
    pattern = m.Call(m.Attribute(m.Name(), m.Name("backward")), args=[])
    for index, statement in enumerate(method.body.body):
        call = expression_of(statement)
        if call is not None and m.matches(call, pattern):
            name = cst.ensure_type(cst.ensure_type(call, cst.Call).func, cst.Attribute).value
            return index, cst.ensure_type(name, cst.Name).value
    return None


def step_parts(place: ClassPlace, method: cst.FunctionDef) -> StepParts:
    """Read a method that holds a `backward()`.

    Raises:
        NotMovedError: it does more than a training step does, or does it in another order.
    """
    found = find_backward(method)
    assert found is not None
    index, result = found
    parts = StepParts(place, method, result=result)
    _check_arguments(method)
    body = list(method.body.body)
    for statement in body[index + 1 :]:
        _read_update(parts, statement)
    if not parts.optimizer:
        raise NotMovedError(method, "no step of an optimizer follows `backward()`")
    parts.loss = [one for one in body[:index] if not _zeroes(one, parts.optimizer)]
    for statement in parts.loss:
        _check_loss(place.file, statement)
        _check_effects(place, statement)
    return parts


def _check_arguments(method: cst.FunctionDef) -> None:
    params = method.params
    stars = isinstance(params.star_arg, cst.Param) or params.star_kwarg is not None
    if stars or params.kwonly_params or params.posonly_params or method.decorators:
        raise NotMovedError(method, "its arguments are not plain ones, or it is decorated")
    if any(param.default is not None for param in params.params):
        raise NotMovedError(method, "an argument has a default")
    if not params.params or params.params[0].name.value != "self":
        raise NotMovedError(method, "it is not a method of an object")


def _zeroes(statement: cst.CSTNode, optimizer: str) -> bool:
    call = expression_of(statement)
    own = m.Attribute(m.Name("self"), m.Name(optimizer))
    return call is not None and m.matches(call, m.Call(m.Attribute(own, m.Name("zero_grad"))))


def _read_update(parts: StepParts, statement: cst.CSTNode) -> None:
    """Read one statement after `backward()`."""
    small = statement_of(statement)
    if parts.returns:
        raise NotMovedError(statement, "a statement follows the return of the loss")
    if isinstance(small, cst.Return):
        if not m.matches(small, m.Return(m.Name(parts.result))):
            raise NotMovedError(statement, "it returns something else than the loss")
        parts.returns = True
        return
    call = expression_of(statement)
    if not isinstance(call, cst.Call):
        raise NotMovedError(statement, "a statement after `backward()` is no part of an update")
    _read_call(parts, call)


def _read_call(parts: StepParts, call: cst.Call) -> None:
    name = parts.place.file.imported_name(call.func)
    ours = parts.place.file.torch_xla_name(call.func)
    stepped = stepped_optimizer(parts.place.file, call)
    if ours in _ENDS:
        return
    if name in _CLIPS:
        _read_clip(parts, call)
        return
    helper = own_attribute(call.func)
    if helper is not None and not call.args and helper in parts.place.methods():
        inner = only_step(parts.place, helper)
        if inner is not None:
            parts.helpers.append(helper)
            stepped = inner
    if stepped is None:
        if parts.optimizer and _zeroes_call(call, parts.optimizer):
            return
        raise NotMovedError(call, f"`{parts.place.file.code(call)}` is no part of an update")
    if parts.optimizer:
        raise NotMovedError(call, "a second step of an optimizer")
    parts.optimizer = stepped


def _zeroes_call(call: cst.Call, optimizer: str) -> bool:
    own = m.Attribute(m.Name("self"), m.Name(optimizer))
    return m.matches(call, m.Call(m.Attribute(own, m.Name("zero_grad"))))


def _read_clip(parts: StepParts, call: cst.Call) -> None:
    norm = argument(call, 1, "max_norm")
    if parts.optimizer or parts.clip or norm is None or keywords(call) - {"max_norm"}:
        raise NotMovedError(call, "it clips gradients after the update, twice, or with options")
    if not isinstance(norm, cst.Float | cst.Integer) or len(call.args) != 2:
        raise NotMovedError(call, "its `max_norm` is not a number written there")
    if not m.matches(
        call.args[0].value,
        m.Call(m.Attribute(m.Attribute(m.Name("self")), m.Name("parameters")), args=[]),
    ):
        raise NotMovedError(call, "it clips other gradients than those of all parameters")
    parts.clip = norm.value


def stepped_optimizer(file: SourceFile, call: cst.Call) -> str | None:
    """Return the attribute of the optimizer that a call steps, or None."""
    if m.matches(call, m.Call(m.Attribute(attr=m.Name("step")), args=[])):
        return own_attribute(cst.ensure_type(call.func, cst.Attribute).value)
    if file.torch_xla_name(call.func) == f"{_CORE}.optimizer_step":
        if keywords(call) <= {"barrier"}:
            return own_attribute(argument(call, 0, "optimizer"))
    return None


def only_step(place: ClassPlace, name: str) -> str | None:
    """Return the attribute of the optimizer that a method steps, if it does nothing else."""
    method = place.methods()[name]
    body = list(method.body.body)
    call = expression_of(body[0]) if len(body) == 1 else None
    return stepped_optimizer(place.file, call) if isinstance(call, cst.Call) else None


def _check_loss(file: SourceFile, statement: cst.CSTNode) -> None:
    for kind in _FORBIDDEN:
        for node in file.all(kind, statement):
            raise NotMovedError(node, f"the loss holds `{file.code(node)}`")
    for node in [*file.all(cst.Attribute, statement), *file.all(cst.Name, statement)]:
        if file.torch_xla_name(node) is not None:
            raise NotMovedError(node, f"the loss uses `{file.code(node)}`")
    for target in [*file.all(cst.AssignTarget, statement), *file.all(cst.AugAssign, statement)]:
        if not _is_local(target.target):
            code = file.code(target.target)
            raise NotMovedError(target, f"the loss sets `{code}`, which the step would lose")


def _check_effects(place: ClassPlace, statement: cst.CSTNode) -> None:
    """Check that nothing happens besides the loss: it would once, while the program is traced."""
    file = place.file
    for small in file.all(cst.Expr, statement):
        if not isinstance(small.value, cst.SimpleString):
            raise NotMovedError(small, f"`{file.code(small)}` is no part of a loss")
    for call in file.all(cst.Call, statement):
        takes = m.matches(call.func, m.Name("next")) or m.matches(
            call.func, m.Attribute(attr=m.Name("pop") | m.Name("popleft"))
        )
        if takes or own_attribute(call.func) in place.methods():
            raise NotMovedError(call, f"`{file.code(call)}` may do more than a part of a loss")
    for text in file.all(cst.SimpleString, statement):
        if text.evaluated_value in XLA_TEXTS:
            raise NotMovedError(text, f"the loss names the device {text.value}")


def _is_local(target: cst.CSTNode) -> bool:
    if isinstance(target, cst.Tuple | cst.List):
        return all(_is_local(element.value) for element in target.elements)
    return isinstance(target, cst.Name)
