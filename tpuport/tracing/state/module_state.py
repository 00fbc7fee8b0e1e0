"""A module's state: every tensor that it refers to by name, and what a call changed."""

import copy
import types
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tpuport.foundation import pytree
from tpuport.foundation.pytree.clone import Cloner
from tpuport.foundation.pytree.rebound import rebind_functions
from tpuport.foundation.pytree.tensor_classes import is_class_of_tensors
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import TracedTensor, meta_of
from tpuport.tracing.state.hook_state import hooks_of, kept_hooks, refuse_handles
from tpuport.tracing.state.places import exchanged, places_in
from tpuport.tracing.state.tensor_attributes import (
    OWN,
    attribute_keys,
    refuse_class,
)

# Attributes that torch keeps on every module for itself, hooks included.
_INTERNAL = frozenset(torch.nn.Module().__dict__) - {"training"}


@dataclass
class StateTree:
    """The state of a module that a call may read or change, flattened.

    `leaves` are its tensors (and traced numbers) by name: the fqn for parameters and buffers,
    `fqn.attribute[...]` for others. `statics` are the Python values by name. `hooks` are those of
    modules that have some, by fqn. `modules` says which there are, and what each holds in which
    order: a module may be held in several places. `trained` says which parameters require grad, if
    graphs count. `set_on` has a key for each attribute that a script has set on a tensor, by name.
    """

    leaves: dict[str, Any]
    statics: dict[str, Any]
    aliases: dict[str, list[str]]
    owners: dict[str, tuple[str, str]]
    values: dict[str, Any]
    registered: set[str]
    modules: dict[str, tuple[Any, ...]]
    hooks: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    trained: dict[str, bool] = field(default_factory=dict)
    set_on: dict[str, Any] = field(default_factory=dict)

    def attributes_of(self, names: Iterable[str]) -> list[str]:
        """Return the names of the attributes that hold some leaves, under all of their names."""
        paths = (path for name in names for path in (name, *self.aliases.get(name, ())))
        return list(dict.fromkeys(map(self.attribute_of, paths)))

    def names_in(self, attributes: Collection[str]) -> dict[int, str]:
        """Return a name for each tensor, by id: that of a parameter or buffer, else one below one
        of some attributes if it has one.
        """
        found = {}
        for first, leaf in self.leaves.items():
            others = () if first in self.registered else self.aliases.get(first, ())
            every = (first, *others)
            own = (name for name in every if self.attribute_of(name) in attributes)
            found[id(leaf)] = next(own, first)
        return found

    def attribute_of(self, name: str) -> str:
        """Return the name of the attribute that holds a leaf, at any depth."""
        while name not in self.owners:
            name = name[: max(name.rfind("["), name.rfind("."))]
        return name

    def drop_unread(self, reads: Callable[[str], bool]) -> None:
        """Drop attributes of modules and tensors that no code reads, as `reads` says by name."""
        unread = [
            name
            for name, (_, attribute) in self.owners.items()
            if name not in self.registered and name in self.statics
            if not reads(attribute) and attribute not in ("training", "forward")
        ]
        for name in unread:
            del self.statics[name]
        starts = tuple(name + end for name in unread for end in ("[", "."))
        for name in [n for n in self.leaves if n in unread or (starts and n.startswith(starts))]:
            del self.leaves[name]
        for name in [n for n in self.set_on if not reads(n.rpartition(".")[2])]:
            del self.set_on[name]


def named_owners(
    module: torch.nn.Module, *, repeated: bool = False
) -> list[tuple[str, torch.nn.Module]]:
    """Return each submodule with its fqn, like `named_modules`, but much faster.

    Args:
        module: Any module; it comes first, with an empty fqn.
        repeated: Return a module that is held in several places once for each, not only once.
    """
    found: list[tuple[str, torch.nn.Module]] = []
    seen: set[int] = set()
    stack = [("", module)]
    while stack:
        fqn, owner = stack.pop()
        if id(owner) in seen:
            continue
        if not repeated:
            seen.add(id(owner))
        found.append((fqn, owner))
        prefix = fqn + "." if fqn else ""
        children = [(prefix + name, m) for name, m in owner._modules.items() if m is not None]
        stack += reversed(children)
    return found


def state_tree(
    module: torch.nn.Module,
    number_names: set[str] | frozenset[str] = frozenset(),
    *,
    objects: bool = False,
    graphs: bool = False,
    unread: frozenset[str] = frozenset(),
) -> StateTree:
    """Flatten a module's state, by name.

    Args:
        module: Any module.
        number_names: Python numbers (by name) that count as leaves.
        objects: Flatten objects without tensors too, so that a change in one is seen.
        graphs: Whether a tensor that requires grad, other than a parameter, is of another kind.
        unread: Attributes, by full name, that are left out.
    """
    tree = StateTree({}, {}, {}, {}, {}, set(), {})
    names: dict[int, str] = {}

    def leaf(tree: StateTree, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            first = names.setdefault(id(value), name)
            if first != name:
                tree.aliases.setdefault(first, []).append(name)
                return
            if not value.__dict__.keys() <= OWN or is_class_of_tensors(type(value)):
                tree.set_on.update(attribute_keys(name, value))
        tree.leaves[name] = value

    # Without this, reading a tensor's size would go through the modes of a running trace.
    with torch._C.DisableTorchFunction():
        _take_apart(tree, leaf, module, number_names, objects, unread)
        if graphs:
            _note_graphs(tree)
    return tree


def _note_graphs(tree: StateTree) -> None:
    """Make tensors that require grad, other than parameters, count as of another kind."""
    tree.trained = {
        name: leaf.requires_grad
        for name, leaf in tree.leaves.items()
        if name in tree.registered and isinstance(leaf, torch.nn.Parameter) and leaf.is_leaf
    }
    for name, leaf in tree.leaves.items():
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            if not isinstance(leaf, torch.nn.Parameter):
                full = tree.attribute_of(name)
                kind = (name, "a leaf" if leaf.is_leaf else "has a graph")
                tree.statics[full] = (tree.statics[full], kind)


def _take_apart(
    tree: StateTree,
    leaf: Callable[[StateTree, str, Any], None],
    module: torch.nn.Module,
    number_names: set[str] | frozenset[str],
    objects: bool,
    unread: frozenset[str],
) -> None:
    # This runs over the complete model at each trace: local names are faster than attributes.
    owners, values, statics = tree.owners, tree.values, tree.statics
    modules = named_owners(module)
    for fqn, owner in modules:
        tree.modules[fqn] = (id(owner), type(owner), *places_in(owner))
        if (hooks := hooks_of(owner)) is not None:
            tree.hooks[fqn] = hooks
        prefix = fqn + "." if fqn else ""
        for holder in (owner._parameters, owner._buffers):
            for name, value in holder.items():
                full = prefix + name
                owners[full], values[full] = (fqn, name), value
                if value is None or pytree.is_sparse(value):
                    statics[full] = pytree.hashable(value, [])
                else:
                    leaf(tree, full, value)
                    tree.registered.add(full)
                    statics[full] = _tensor_kind(value)
    # A module may keep parameters of the modules below it (an optimizer, a list of weights): these
    # have their registered names, so attributes come after all parameters.
    for fqn, owner in modules:
        prefix, held = fqn + "." if fqn else "", owner.__dict__
        for name in [
            name
            for name in held
            if name not in _INTERNAL and not (unread and prefix + name in unread)
        ]:
            value = held[name]
            kind = type(value)
            if kind is tuple and set(map(type, value)) == {int}:
                kind = int  # the shape of a norm: comparing it is as exact
            if kind in _EXACT and not number_names:
                full = prefix + name
                owners[full], values[full] = (fqn, name), value
                statics[full] = (type(value), value)
            else:
                _attribute(tree, leaf, fqn, prefix, name, value, number_names, objects)


def refuse_moved_parameters(before: StateTree, after: StateTree) -> None:
    """Refuse a call after which a parameter has the name of another, as after `a, b = b, a`.

    Raises:
        PortError: it has. Its gradient would be given to the parameter that had the name.
    """
    names = [name for name in before.values if name in before.registered]
    first = {id(before.values[name]): name for name in reversed(names)}
    for name in names:
        now = after.values.get(name)
        old = first.get(id(now), name)
        if (
            isinstance(now, torch.nn.Parameter)
            and now.requires_grad
            and old != name
            and after.values.get(old) is not now
        ):
            raise port_error(
                f"the call gives {name!r} the tensor that {old!r} was",
                code="TPU406",
                remedy="exchange the values under no_grad (copy_), keep both in a list and choose"
                " by an index, or exchange them outside of the ported call",
            )


def refuse_new_ties(before: StateTree, after: StateTree) -> None:
    """Refuse a call after which names that were of two tensors are of one, or the reverse.

    Each name has a value of its own in the state, so one of them would keep an old value. A new
    name of a parameter is one too many in `named_parameters` and in the optimizer.

    Raises:
        PortError: the call left such names (`self.head.weight = self.embed.weight`).
    """
    if before.aliases == after.aliases:
        return
    for first, others in after.aliases.items():
        added = sorted((after.registered & {first, *others}) - before.registered)
        if added and (known := before.registered & {first, *others}):
            raise port_error(
                f"the call registers the parameter or buffer {min(known)!r} as {added[0]!r} too",
                code="TPU406",
                remedy="register it before the model is ported, or keep it in a tuple:"
                f" self.{added[0].rpartition('.')[2]} = (tensor,)",
            )
    was, now = _groups(before), _groups(after)
    known = before.leaves.keys() | was.keys()  # what else is kept is new: no name has an old value
    for name, group in {**was, **now}.items():
        owner = name if name in after.values else name.partition("[")[0]
        if name not in known or was.get(name, set()) & known == now.get(name, set()) & known:
            continue
        is_kept = name in before.registered and before.values[name] is after.values.get(name)
        if not is_kept and before.statics.get(owner) == after.statics.get(owner):
            others = ", ".join(sorted(group - {name}))
            raise port_error(
                f"the call makes {name!r} and {others!r} one tensor, or two of one",
                code="TPU406",
                remedy="tie or part them before the model is ported, or give one of them a"
                " .clone(); under porting(), leave the class to eager PyTorch: --eager",
            )


def _groups(tree: StateTree) -> dict[str, frozenset[str]]:
    """Return all names of a tensor, for each name that is one of several."""
    every = [frozenset((first, *others)) for first, others in tree.aliases.items()]
    return {name: group for group in every for name in group}


def forget_random_states(before: StateTree, after: StateTree) -> None:
    """Take no notice of states of the program's random numbers that a call kept in attributes.

    They mean nothing to the next call, which draws other numbers.
    """
    kept = [name for name, leaf in after.leaves.items() if hasattr(leaf, "_stream")]
    for path in kept:
        name = path.partition("[")[0]
        if name in before.owners:
            del after.leaves[path]
            after.statics[name], after.values[name] = before.statics[name], before.values[name]


# Types whose values are interchangeable if they are equal.
_EXACT = frozenset({bool, int, str, type(None), torch.dtype, torch.device, types.FunctionType})
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, types.FunctionType, type)


def _attribute(
    tree: StateTree,
    leaf: Any,
    fqn: str,
    prefix: str,
    name: str,
    value: Any,
    number_names: set[str] | frozenset[str],
    objects: bool,
) -> None:
    full = prefix + name
    tree.owners[full] = (fqn, name)
    tree.values[full] = value
    if isinstance(value, sym_numbers.SYMBOLIC) or (
        full in number_names and isinstance(value, (bool, int, float))
    ):
        tree.leaves[full] = value
        return
    if isinstance(value, _PLAIN):
        tree.statics[full] = (type(value), pytree.hashable(value, []))
        return
    leaves, spec, paths = pytree.flatten_with_paths(
        value, leaf=_state_leaf, path=full, objects=objects
    )
    for container in spec.containers.values():
        refuse_class(full, container)
    for one, path in zip(leaves, paths, strict=True):
        leaf(tree, path, one)
    tree.statics[full] = (spec.key, tuple(_tensor_kind(one) for one in leaves))


def _tensor_kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value)
    kind = (tuple(value.shape), value.dtype)
    return kind if value.is_contiguous() else (*kind, _layout(value))


def _layout(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor whose elements fill its memory, None for others.

    The host holds the others in contiguous memory, so theirs say nothing.
    """
    dims = [(step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True)]
    filled = 1
    for step, size in sorted(dim for dim in dims if dim[1] != 1):
        if step != filled:
            return None
        filled *= size
    return tuple(step for step, size in dims if size != 1)


def _state_leaf(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not pytree.is_sparse(value)
    return isinstance(value, sym_numbers.SYMBOLIC)


@dataclass
class PythonChanges:
    """The Python attributes and hooks of modules that a call changed.

    Traced tensors in the new values are placeholders, and so are the traced numbers of the
    attributes in `numbers`. `hooks` has, by fqn, all hook attributes of modules whose hooks
    changed, and `trained` the parameters whose `requires_grad` changed. `own` are the placeholders
    in the new values for parameters and buffers, and `modules` the traced copies of modules in
    them, by name. `constants` are the host tensors in them that the call made, by id: each call
    makes its own. `parameters` are the names of parameters that the call registered.
    """

    names: list[str]
    before: dict[str, Any]
    after: dict[str, Any]
    owners: dict[str, tuple[str, str]]
    gone: list[str]
    registered: set[str]
    hooks: dict[str, dict[str, Any]] = field(default_factory=dict)
    replacement: torch.nn.Module | None = None
    numbers: frozenset[str] = frozenset()
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    trained: dict[str, bool] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)

    @property
    def causes(self) -> list[str]:
        """Return the names of what changed."""
        if not self.hooks:
            return self.names
        first, more = next(iter(self.hooks)) or "the model", len(self.hooks) - 1
        return [*self.names, f"hooks of {first}" + (f" and {more} more" if more else "")]

    @property
    def host_state(self) -> dict[str, torch.Tensor]:
        """Return new values of parameters and buffers that depend on no input: no program returns
        them.
        """
        held = {n: v.value if isinstance(v, _BufferSlot) else v for n, v in self.after.items()}
        mine = {name: value for name, value in held.items() if name in self.registered}
        return {n: v for n, v in mine.items() if torch.is_tensor(v) and v.device.type != "meta"}

    def apply(self, module: torch.nn.Module) -> torch.nn.Module:
        """Apply the changes to a module of the same structure, and return the module to use.

        A call that exchanged submodules returns another module, with the new structure.
        """
        if self.replacement is not None:
            return self.replacement
        after = self._with_own(module) if self.own or self.modules else self.after
        owners = [self.owners[name] for name in self.names]
        held = [vars(module.get_submodule(fqn)).get(attribute) for fqn, attribute in owners]
        for name in self.names:
            fqn, attribute = self.owners[name]
            owner = module.get_submodule(fqn)
            if name not in after:
                for holder in (owner._parameters, owner._buffers, owner.__dict__):
                    holder.pop(attribute, None)
                continue
            value = after[name]
            if attribute in owner._buffers and (value is None or isinstance(value, torch.Tensor)):
                owner._buffers[attribute] = value
            elif attribute in owner._parameters:
                owner._parameters[attribute] = value
            elif isinstance(value, _BufferSlot):
                owner.__dict__.pop(attribute, None)
                owner._buffers[attribute] = value.value
                owner._non_persistent_buffers_set |= {attribute}.intersection(value.unsaved)
            else:
                owner.__dict__[attribute] = value
        self.put_hooks_and_flags(module)
        rebind_functions(module, zip(held, map(after.get, self.names), strict=True))
        return module

    def _with_own(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the new values, with the parts of a module in them.

        An average of weights, say, refers to them beside the module (torch-ema by weak references).
        """
        leaves = state_tree(module).leaves
        own = {id(placeholder): leaves[name] for name, placeholder in self.own.items()}
        cloner = Cloner(lambda tensor: own.get(id(tensor), tensor))
        cloner.memo.update({id(m): module.get_submodule(n) for n, m in self.modules.items()})
        return {name: cloner.clone(value) for name, value in self.after.items()}

    def put_numbers(self, module: torch.nn.Module, values: dict[str, Any]) -> None:
        """Set attributes whose numbers the program returned, for which `after` has placeholders."""
        for name in self.numbers:
            fqn, attribute = self.owners[name]
            number = type(self.after[name])(values[name])
            module.get_submodule(fqn).__dict__[attribute] = number

    def put_hooks_and_flags(self, module: torch.nn.Module) -> None:
        """Set the changed hooks and flags of parameters on a module of the same structure."""
        for name, flag in self.trained.items():
            module.get_parameter(name).requires_grad_(flag)
        for fqn, kept in self.hooks.items():
            module.get_submodule(fqn).__dict__.update(
                {name: copy.copy(value) for name, value in kept.items()}
            )


class _Gone:
    """What a weak reference refers to that has ended."""


def _unless_gone(value: Any, cloner: Cloner) -> Any:
    """Return a value, and for a weak reference to what the module does not keep, a dead one."""
    is_weak = isinstance(value, weakref.ref) and not isinstance(value(), torch.Tensor)
    return weakref.ref(_Gone()) if is_weak and id(value()) not in cloner.memo else value


@dataclass
class _BufferSlot:
    """A tensor registered as a buffer during the call, and what its module does not save."""

    value: Any
    unsaved: Collection[str]


def python_changes(
    before: StateTree,
    after: StateTree,
    module: torch.nn.Module,
    is_foreign: Callable[[torch.Tensor], bool],
    graphs: bool,
) -> PythonChanges | None:
    """Return what a call changed in the Python state of a module, or None.

    Args:
        before: The state tree of the traced copy before the call.
        after: The state tree of the same copy after the call.
        module: The traced copy.
        is_foreign: Says whether a host tensor was there before the call.
        graphs: Whether tensors that the call leaves keep their graphs.

    Raises:
        PortError: A list, dict or object of the module holds a traced number.
    """
    _refuse_inner_numbers(after)
    names = [
        name
        for name in dict.fromkeys([*before.statics, *after.statics])
        if before.statics.get(name, _ABSENT) != after.statics.get(name, _ABSENT)
    ]
    is_other = exchanged(before.modules, after.modules)
    same = not is_other and before.hooks == after.hooks
    trained = {n: flag for n, flag in after.trained.items() if before.trained.get(n, flag) != flag}
    if not names and same and not trained:
        return None
    _refuse_ids(names, after, module)
    names += _sharing(names, after)
    paths = {id(after.leaves[n]): n for n in after.registered if n in before.leaves}
    own: dict[str, torch.Tensor] = {}
    constants: dict[int, torch.Tensor] = {}

    def placeholder(tensor: torch.Tensor) -> torch.Tensor:
        path, made = paths.get(id(tensor)), _placeholder(tensor, graphs)
        if made is tensor and not is_foreign(tensor):
            constants[id(tensor)] = tensor
        if path is not None and path not in names and made is not tensor:
            own[path] = made
        return made

    cloner = Cloner(placeholder)
    cloner.memo.update({id(m): m for m in module.modules()})
    values, numbers = _changed_values(before, after, module, names, cloner)
    refuse_handles(values)
    old = {name: before.values.get(name) for name in names}
    owners = {name: (after.owners.get(name) or before.owners[name]) for name in names}
    hooks = _changed_hooks(before, after, module)
    gone = [name for name in before.leaves if name not in after.leaves]
    replacement = Cloner(_placeholder).clone(module) if is_other else None
    changes = PythonChanges(
        names, old, values, owners, gone, after.registered, hooks, replacement, numbers
    )
    changes.own, changes.modules = own, _modules_in(values, module)
    changes.constants, changes.trained = constants, trained
    known = after.registered - before.registered
    changes.parameters = [n for n in known if isinstance(after.leaves[n], torch.nn.Parameter)]
    return changes


def _sharing(names: list[str], after: StateTree) -> list[str]:
    """Return the other attributes that hold an object or container that changed ones hold too.

    Copies of all of them are made together, so that they hold one again.
    """
    values = {n: v for n, v in after.values.items() if type(v) not in pytree.ATOMIC}
    parts = {n: _inside(v) for n, v in values.items() if n not in after.registered}
    found: list[str] = []
    todo = [name for name in names if name in parts]
    held = set().union(*(parts.pop(name) for name in todo)) if todo else set()
    while more := [name for name, inside in parts.items() if not held.isdisjoint(inside)]:
        found += more
        held = held.union(*(parts.pop(name) for name in more))
    return found


def _inside(value: Any) -> set[int]:
    """Return the ids of what is inside of a value and may change: objects, lists and the like."""
    fixed = (torch.nn.Module, torch.Tensor, tuple, frozenset, *pytree.ATOMS)
    return {id(one) for one in pytree.walk([value], _parts) if not isinstance(one, fixed)}


def _parts(value: Any) -> list[Any]:
    if isinstance(value, (torch.nn.Module, torch.Tensor, *pytree.ATOMS)):
        return []
    return [part for part in pytree.children(value).all if type(part) not in pytree.ATOMIC]


def _refuse_ids(names: list[str], after: StateTree, module: torch.nn.Module) -> None:
    """Refuse numbers in changed attributes that are ids of tensors or modules of the trace.

    Those are copies, and other ones at the next call.
    """
    own = {id(one) for one in (*after.leaves.values(), *module.modules())}
    for name in names:
        if name not in after.values or isinstance(after.values[name], _PLAIN):
            continue
        for one in pytree.walk([after.values[name]], _parts):
            content = () if isinstance(one, torch.Tensor) else pytree.children(one)
            numbers = content and (*(content.keys or ()), *content.parts)
            if any(type(number) is int and number in own for number in numbers):
                raise port_error(
                    f"the call keeps the id of a tensor or module in {name!r}, and a trace has"
                    " copies of them",
                    code="TPU406",
                    remedy="keep the tensor or module itself there (as the key of a dict, say), or"
                    " its name; under porting(), leave the class to eager PyTorch: --eager NAME",
                )


def _changed_values(
    before: StateTree,
    after: StateTree,
    module: torch.nn.Module,
    names: Iterable[str],
    cloner: Cloner,
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return copies of changed attributes by name, and which of them are traced numbers."""
    values: dict[str, Any] = {}
    numbers: set[str] = set()
    for name in names:
        if name not in after.values:
            continue
        value = _unless_gone(cloner.clone(after.values[name]), cloner)
        if isinstance(value, sym_numbers.SYMBOLIC):
            value = sym_numbers.placeholder(value)
            numbers.add(name)
        if name in after.registered and name not in before.owners:
            owner = module.get_submodule(after.owners[name][0])
            value = _BufferSlot(value, owner._non_persistent_buffers_set)
        values[name] = value
    return values, frozenset(numbers)


def _changed_hooks(
    before: StateTree, after: StateTree, module: torch.nn.Module
) -> dict[str, dict[str, Any]]:
    """Return all hook attributes of the modules whose hooks a call changed, by fqn."""
    return {
        fqn: kept_hooks(module.get_submodule(fqn), fqn, before.hooks.get(fqn))
        for fqn in dict.fromkeys([*before.hooks, *after.hooks])
        if fqn in after.modules and before.hooks.get(fqn) != after.hooks.get(fqn)
    }


def moved_constants(
    before: StateTree,
    after: StateTree,
    left: dict[str, torch.Tensor],
    changes: PythonChanges | None,
) -> list[str]:
    """Return the names under which a call left another host tensor than was there before.

    An example is `self.a, self.b = self.b, self.a` where both are plain attributes. Where the
    structure changed too, it is among the Python changes, unless a value of the program was there.
    `left` has the tensors after the call: traced ones for what they stand for.
    """
    known = () if changes is None else changes.names
    return [
        name
        for name, leaf in left.items()
        if leaf is not (old := before.leaves.get(name, leaf))
        and not isinstance(leaf, TracedTensor)
        and (isinstance(old, TracedTensor) or after.attribute_of(name) not in known)
    ]


def _modules_in(values: dict[str, Any], module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the parts of a module that values refer to, by name."""

    bare = pytree.ATOMIC - {types.FunctionType}

    def parts(value: Any) -> list[Any]:
        if isinstance(value, pytree.CALLABLES):  # what stands for a submodule's `forward` in a call
            return pytree.held_by_callable(value)
        if isinstance(value, (torch.nn.Module, torch.Tensor, *pytree.ATOMS)):
            return []
        return [part for part in pytree.children(value).all if type(part) not in bare]

    roots = [value for value in values.values() if type(value) not in bare]
    found = pytree.walk(roots, parts) if roots else []
    known = {id(value) for value in found if isinstance(value, torch.nn.Module)}
    return {name: m for name, m in module.named_modules() if id(m) in known} if known else {}


def _refuse_inner_numbers(after: StateTree) -> None:
    """Refuse a traced number inside of an attribute: only an attribute itself can be state."""
    for path, leaf in after.leaves.items():
        if isinstance(leaf, sym_numbers.SYMBOLIC) and path not in after.owners:
            raise port_error(
                f"the module keeps a number that depends on the program's inputs in {path!r}",
                code="TPU405",
                remedy="keep it as a tensor, or as an attribute of the module itself",
            )


_ABSENT = object()


def _placeholder(tensor: torch.Tensor, graphs: bool = False) -> torch.Tensor:
    """Return a host tensor unchanged, and a traced one as a meta tensor like it."""
    if not isinstance(tensor, TracedTensor):
        return tensor
    if getattr(tensor, "_is_param", False):
        return torch.nn.Parameter(meta_of(tensor), requires_grad=tensor.requires_grad)
    meta = meta_of(tensor, like=graphs)
    if not graphs or not tensor.requires_grad or tensor.is_leaf:
        return meta
    with torch.enable_grad():
        return meta.view_as(meta)  # with a graph, as it may be written in place
