"""What else a class does with the model and the optimizer of its step: proof that it may move."""

import libcst as cst
import libcst.matchers as m

from tpuport.migrate.project import ClassPlace, Project
from tpuport.migrate.source_file import own_attribute
from tpuport.migrate.step_parts import NotMovedError, StepParts, only_step

# Names that the rewritten class gets.
ADDED = ("train_step", "train_state", "port_model")


def model_of(project: Project, parts: StepParts) -> str:
    """Return the attribute that holds the model, after checking every use of it.

    Raises:
        NotMovedError: the optimizer's parameters are not those of one attribute, or the class uses
            the model or the optimizer in a way that a training step would not see.
    """
    family = project.family(parts.place)
    names = {name for place in family for name in _trained(place, parts.optimizer)}
    if len(names) != 1 or "" in names:
        raise NotMovedError(
            parts.method,
            f"self.{parts.optimizer} is not made of the parameters of one attribute of its class",
        )
    (model,) = names
    if not any(_calls(parts, statement, model) for statement in parts.loss):
        raise NotMovedError(parts.method, f"its loss does not call self.{model}")
    _check_names(project, parts)
    for place in family:
        unknown = {*place.bases} - project.classes.keys() - {"object"}
        if unknown:
            name = min(unknown)
            raise NotMovedError(
                place.node, f"{place.name} extends {name}, which is in no file given"
            )
        _check_overrides(parts, place)
        for use in place.own_uses(model):
            _check_model_use(parts, place, use)
        for use in place.own_uses(parts.optimizer):
            _check_optimizer_use(parts, place, use)
    _check_others(project, {model, parts.optimizer})
    return model


def _trained(place: ClassPlace, optimizer: str) -> set[str]:
    """Return the attributes whose parameters the optimizer is made over."""
    found: set[str] = set()
    pattern = m.Call(m.Attribute(attr=m.Name("parameters")), args=[])
    for use in place.own_uses(optimizer):
        value = _assigned(place, use)
        if isinstance(value, cst.Call) and value.args and m.matches(value.args[0].value, pattern):
            owner = cst.ensure_type(value.args[0].value, cst.Call).func
            found.add(own_attribute(cst.ensure_type(owner, cst.Attribute).value) or "")
        elif value is not None:
            found.add("")
    return found


def _assigned(place: ClassPlace, target: cst.CSTNode) -> cst.BaseExpression | None:
    """Return what an assignment gives to this target, or None if it is no target."""
    parent = place.file.parent(target)
    if isinstance(parent, cst.AssignTarget):
        statement = place.file.parent(parent)
        return statement.value if isinstance(statement, cst.Assign) else None
    return None


def _calls(parts: StepParts, statement: cst.CSTNode, model: str) -> bool:
    calls = parts.place.file.all(cst.Call, statement)
    return any(own_attribute(call.func) == model for call in calls)


def _check_names(project: Project, parts: StepParts) -> None:
    """Check that no name is added that is in use."""
    taken = {*ADDED, f"{parts.method.name.value}_loss"}
    for place in project.family(parts.place):
        for node in place.file.all(cst.Attribute, place.node):
            if own_attribute(node) in taken:
                raise NotMovedError(node, f"`self.{node.attr.value}` is a name that it would add")
    names = {node.value for node in parts.place.file.all(cst.Name, parts.method)}
    if "model" in names - {"self"} and "model" in _locals(parts):
        raise NotMovedError(parts.method, "`model` is a variable of it already")


def _locals(parts: StepParts) -> set[str]:
    file = parts.place.file
    names = set(parts.arguments)
    for target in file.all(cst.AssignTarget, parts.method):
        names |= {node.value for node in file.all(cst.Name, target)}
    return names


def _check_overrides(parts: StepParts, place: ClassPlace) -> None:
    """Check what a class that extends this one, or is extended, has for the step's methods."""
    if place.node is parts.place.node:
        return
    methods = place.methods()
    if parts.method.name.value in methods:
        raise NotMovedError(methods[parts.method.name.value], f"{place.name} has one of its own")
    for name in parts.helpers:
        if name in methods and only_step(place, name) != parts.optimizer:
            raise NotMovedError(methods[name], f"{place.name}.{name} does more than a step")


def _in_method(place: ClassPlace, node: cst.CSTNode) -> str:
    function = place.file.around(node, cst.FunctionDef)
    return "" if function is None else function.name.value


def _check_model_use(parts: StepParts, place: ClassPlace, use: cst.Attribute) -> None:
    file, where = place.file, _in_method(place, use)
    if any(one is statement for one in file.above(use) for statement in parts.loss):
        return
    if where == "__init__" and _is_construction(parts, place, use):
        return
    parent = file.parent(use)
    call = None if parent is None else file.parent(parent)
    trains = m.Call(m.Attribute(attr=m.Name("train")), args=[])
    if call is not None and m.matches(call, trains):
        return
    if where == parts.method.name.value and call is not None:
        if m.matches(call, m.Call(m.Attribute(attr=m.Name("parameters")))):
            return  # for the clipping of gradients
    raise NotMovedError(
        use,
        f"`{file.code(call or use)}` needs the weights outside of the step, which keeps them in"
        " its state",
    )


def _is_construction(parts: StepParts, place: ClassPlace, use: cst.Attribute) -> bool:
    """Return whether a use in a constructor makes the model, wraps it or makes the optimizer.

    Raises:
        NotMovedError: the model is known by another name too.
    """
    value = _assigned(place, use)
    if value is not None:
        made = value
        while isinstance(made, cst.Call) and m.matches(made.func, m.Attribute(attr=m.Name("to"))):
            made = cst.ensure_type(made.func, cst.Attribute).value
        if not isinstance(made, cst.Call):
            code = place.file.code(value)
            raise NotMovedError(use, f"`{code}` may have other owners, who would see old weights")
        return True
    assign = place.file.around(use, cst.Assign)
    names = [own_attribute(one.target) for one in assign.targets] if assign else []
    return names in ([use.attr.value], [parts.optimizer])


def _check_optimizer_use(parts: StepParts, place: ClassPlace, use: cst.Attribute) -> None:
    where = _in_method(place, use)
    if where == parts.method.name.value or where in parts.helpers:
        return
    if where == "__init__" and _assigned(place, use) is not None:
        return
    raise NotMovedError(use, f"`{place.file.code(use)}` is used outside of the step")


def _check_others(project: Project, names: set[str]) -> None:
    """Check that no other object's attribute of such a name is read, which could be the same."""
    for file in project.files:
        for node in file.all(cst.Attribute):
            if node.attr.value in names and own_attribute(node) is None:
                if file.imported_name(node) is None:
                    raise NotMovedError(node, f"`{file.code(node)}` may be what the step trains")
