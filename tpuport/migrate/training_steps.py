"""Training steps of classes: from backward and an optimizer's step to one program of tpuport."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m

from tpuport.migrate.api_calls import CALL
from tpuport.migrate.project import ClassPlace, Project
from tpuport.migrate.source_file import (
    Edits,
    Note,
    SourceFile,
    argument,
    own_attribute,
    parsed,
    parsed_statements,
)
from tpuport.migrate.step_parts import NotMovedError, StepParts, find_backward, step_parts
from tpuport.migrate.step_uses import model_of

_CORE = "torch_xla.core.xla_model"

_PORT = """
def port_model(self):
    return tpuport.convert(self.{model})
"""
_STEP = """
if self.train_step is None:
    ported = self.port_model()
    self.train_step = make_train_step(
        ported,
        self.{name}_loss,
        from_torch(ported, self.{optimizer}),
        {options}
    )
    self.train_state = self.train_step.init(torch.initial_seed() % 2**31)
self.train_state, metrics = self.train_step(self.train_state, {arguments})
"""
_WAIT = "jax.block_until_ready(self.train_state)"


@dataclass(frozen=True)
class MovedStep:
    """A step that is moved.

    Attributes:
        parts: The step as it was.
        model: The attribute that holds the model.
        names: The method, and attributes that hold it.
    """

    parts: StepParts
    model: str
    names: set[str] = field(default_factory=set)


def find_steps(project: Project, edits: Mapping[SourceFile, Edits]) -> list[MovedStep]:
    """Return the steps that can be moved, and note why others cannot."""
    moved: list[MovedStep] = []
    for place in project.classes.values():
        if place.file not in edits:
            continue
        for method in place.methods().values():
            if find_backward(method) is None:
                continue
            try:
                parts = step_parts(place, method)
                step = MovedStep(parts, model_of(project, parts))
                if any(one.parts.place.node is place.node for one in moved):
                    raise NotMovedError(method, "its class has a second step")
            except NotMovedError as error:
                edits[place.file].left.append(_not_moved(project, place, method, error))
            else:
                step.names.update(_names_of(project, parts))
                moved.append(step)
    return moved


def _not_moved(
    project: Project, place: ClassPlace, method: cst.FunctionDef, error: NotMovedError
) -> Note:
    where = ""
    for file in project.files:
        try:
            line = file.line(error.node)
        except KeyError:
            continue
        where = f"line {line}" if file is place.file else f"{file.name}:{line}"
    text = (
        f"the step {place.name}.{method.name.value} stays in eager PyTorch, on the host: "
        f"{error.reason} ({where}). What to do: write a loss function and make_train_step"
    )
    return Note(place.file.line(method), CALL, text)


def _names_of(project: Project, parts: StepParts) -> set[str]:
    """Return the method's name, and those of attributes that hold it."""
    name = parts.method.name.value
    found = {name}
    for place in project.family(parts.place):
        for assign in place.file.all(cst.Assign, place.node):
            if _held(place.file, assign.value) == name:
                found |= {own_attribute(one.target) or name for one in assign.targets}
    return found


def _held(file: SourceFile, value: cst.BaseExpression) -> str | None:
    if isinstance(value, cst.Call) and file.torch_xla_name(value.func) == "torch_xla.compile":
        return own_attribute(argument(value, 0, "f"))
    return own_attribute(value)


def plan_step(project: Project, edits: Mapping[SourceFile, Edits], step: MovedStep) -> None:
    """Plan the edits that move one step."""
    place, method = step.parts.place, step.parts.method
    mine = edits[place.file]
    mine.handled.update(place.file.all(cst.Attribute, method), place.file.all(cst.Name, method))
    mine.handled.update(place.file.all(cst.Call, method))
    bare = _is_passed_on(project, step)
    mine.replace(method, lambda updated: _moved(place.file, updated, step, bare))
    mine.replace(place.node, _with_state)
    mine.imports |= {
        ("tpuport", None),
        ("torch", None),
        ("tpuport.training", "from_torch"),
        ("tpuport.training", "make_train_step"),
    }
    text = f"{place.name}.{method.name.value} became one program: make_train_step of its loss"
    mine.done.append(Note(place.file.line(method), CALL, text))
    weights = (
        f"the weights are in self.train_state, and self.{step.model} keeps those from before. To"
        " save or evaluate, use self.train_step.load_state(self.train_state).to_torch(); to resume,"
        " tpuport.training.Checkpoints"
    )
    mine.left.append(Note(place.file.line(method), CALL, weights))
    for name in step.parts.helpers:
        _remove_helper(project, edits, step, name)
    for one in project.family(place):
        if one.file in edits:
            _plan_compile(one, edits[one.file], step)
            _plan_waits(one, edits[one.file])
    if step.parts.returns and not bare:
        _plan_results(project, edits, step)


def _moved(
    file: SourceFile, updated: cst.FunctionDef, step: MovedStep, bare: bool
) -> cst.FlattenSentinel[Any]:
    parts, config = step.parts, file.module.config_for_parsing
    kept = [
        new.visit(_ModelAsArgument(step.model))
        for old, new in zip(parts.method.body.body, updated.body.body, strict=True)
        if any(old is one for one in parts.loss)
    ]
    end = cst.SimpleStatementLine([cst.Return(cst.Name(parts.result))])
    params = updated.params.params
    first = params[0].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    given = updated.params.with_changes(params=[first, cst.Param(cst.Name("model")), *params[1:]])
    name = parts.method.name.value
    loss = updated.with_changes(
        name=cst.Name(f"{name}_loss"),
        params=given,
        body=updated.body.with_changes(body=[*kept, end]),
        returns=None,
    )
    options = ["skip_nonfinite=False,"]
    options += [f"clip_norm={parts.clip},"] if parts.clip else []
    text = _STEP.format(
        name=name,
        optimizer=parts.optimizer,
        options=" ".join(options),
        arguments=", ".join(parts.arguments),
    )
    if parts.returns:
        text += f"return {'tpuport.to_torch(%s)' if bare else '%s'}\n" % 'metrics["loss"]'
    port = parsed_statements(_PORT.format(model=step.model), config)[0]
    blank = [cst.EmptyLine(indent=False)]
    taken = updated.with_changes(
        body=updated.body.with_changes(body=list(parsed_statements(text, config))),
        leading_lines=blank,
    )
    return cst.FlattenSentinel([loss, port.with_changes(leading_lines=blank), taken])


class _ModelAsArgument(cst.CSTTransformer):
    """Write `model` for the attribute that holds it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        del original_node
        return cst.Name("model") if own_attribute(updated_node) == self._name else updated_node


def _with_state(updated: cst.ClassDef) -> cst.ClassDef:
    """Add the class attributes in which an object keeps its step, after the docstring."""
    (state,) = cst.parse_module("train_step = train_state = None\n").body
    body = list(updated.body.body)
    at = 1 if body and m.matches(body[0], m.SimpleStatementLine([m.Expr(m.SimpleString())])) else 0
    made = state.with_changes(leading_lines=[cst.EmptyLine(indent=False)] if at else [])
    return updated.with_changes(body=updated.body.with_changes(body=[*body[:at], made, *body[at:]]))


def _remove_helper(
    project: Project, edits: Mapping[SourceFile, Edits], step: MovedStep, name: str
) -> None:
    """Remove a method that only stepped the optimizer, if nothing else calls it."""
    calls = [
        node
        for file, node in _references(project, step.parts.place, [name])
        if not _is_inside(file, node, step.parts.method)
    ]
    for place in project.family(step.parts.place):
        method = place.methods().get(name)
        if method is None or calls or place.file not in edits:
            continue
        mine = edits[place.file]
        mine.handled.update(place.file.all(cst.Attribute, method), place.file.all(cst.Name, method))
        mine.handled.update(place.file.all(cst.Call, method))
        text = f"{place.name}.{name} is gone: the step updates the weights"
        mine.done.append(Note(place.file.line(method), CALL, text))
        mine.replaced[method] = lambda updated: cst.RemoveFromParent()


def _is_inside(file: SourceFile, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
    return any(one is outer for one in file.above(node))


def _plan_compile(place: ClassPlace, edits: Edits, step: MovedStep) -> None:
    """Plan the removal of `torch_xla.compile` around the step."""
    for call in place.file.all(cst.Call, place.node):
        if place.file.torch_xla_name(call.func) == "torch_xla.compile":
            if own_attribute(argument(call, 0, "f")) in step.names:
                edits.handled.add(call.func)
                edits.replace(call, lambda updated: argument(updated, 0, "f"))
                text = f"`{place.file.code(call)}`: the step is one program already"
                edits.done.append(Note(place.file.line(call), CALL, text))


def _plan_waits(place: ClassPlace, edits: Edits) -> None:
    """Plan for waits in a class whose step is moved: they wait for its state."""
    for call in place.file.all(cst.Call, place.node):
        if place.file.torch_xla_name(call.func) == f"{_CORE}.wait_device_ops":
            edits.handled.add(call.func)
            edits.imports.add(("jax", None))
            edits.replace(call, lambda updated: parsed(_WAIT))
            edits.done.append(
                Note(place.file.line(call), CALL, f"`{place.file.code(call)}` became `{_WAIT}`")
            )


# What a step returns: an array, which is made a tensor where it is read.


def _references(
    project: Project, place: ClassPlace, names: Iterable[str]
) -> Iterator[tuple[SourceFile, cst.Attribute]]:
    """Yield each `x.name` that may be of an object of a class or of those related to it."""
    family = {one.node for one in project.family(place)}
    names = set(names)
    for file in project.files:
        for node in file.all(cst.Attribute):
            is_own = own_attribute(node) is not None
            if node.attr.value in names and (
                not is_own or file.around(node, cst.ClassDef) in family
            ):
                yield file, node


def _is_passed_on(project: Project, step: MovedStep) -> bool:
    """Return whether the method is passed on, so that its callers are unknown."""
    for file, node in _references(project, step.parts.place, step.names):
        parent = file.parent(node)
        if isinstance(parent, cst.AssignTarget) or (
            isinstance(parent, cst.Call) and parent.func is node
        ):
            continue
        outer = file.around(node, cst.Assign)
        if outer is None or _held(file, outer.value) != step.parts.method.name.value:
            return True
    return False


def _plan_results(project: Project, edits: Mapping[SourceFile, Edits], step: MovedStep) -> None:
    for file, node in _references(project, step.parts.place, step.names):
        call = file.parent(node)
        if not isinstance(call, cst.Call) or call.func is not node or file not in edits:
            continue
        parent = file.parent(call)
        if isinstance(parent, cst.Expr):
            continue
        edits[file].imports.add(("tpuport", None))
        reads = _read_by_closures(file, parent)
        for name in [call] if reads is None else reads:
            edits[file].replace(name, lambda updated: parsed("tpuport.to_torch(_0)", _0=updated))


def _read_by_closures(file: SourceFile, assign: cst.CSTNode | None) -> list[cst.Name] | None:
    """Return where a result is read, if only step closures get it; else None.

    They run now and then, so that not every step waits for its result.
    """
    if not m.matches(assign or cst.Pass(), m.Assign(targets=[m.AssignTarget(m.Name())])):
        return None
    target = cst.ensure_type(assign, cst.Assign).targets[0].target
    function = file.around(target, cst.FunctionDef)
    if function is None:
        return None
    name = cst.ensure_type(target, cst.Name).value
    reads = [one for one in file.all(cst.Name, function) if one.value == name and one is not target]
    return reads if all(_is_given_to_closure(file, one) for one in reads) else None


def _is_given_to_closure(file: SourceFile, name: cst.Name) -> bool:
    element = file.parent(name)
    call = file.around(name, cst.Call)
    if not isinstance(element, cst.Element) or call is None:
        return False
    return file.torch_xla_name(call.func) == f"{_CORE}.add_step_closure" and argument(
        call, 1, "args"
    ) is file.parent(element)
