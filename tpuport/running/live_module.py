"""A ported model over the user's own module: either has what the other changed."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import torch

from tpuport.errors import PortError
from tpuport.model import arguments, backend, numbers, structure, verify
from tpuport.model.convert import check_signature
from tpuport.model.notes import new_report
from tpuport.model.ported import PortedModel
from tpuport.model.state import Cloner, StateTree, clone_module, state_tree
from tpuport.running import gradients
from tpuport.running.tags import is_tagged, mark_of, tag


class LiveModel(PortedModel):
    """The programs of one module of the user's.

    A `PortedModel` has a copy of its module for good. Here the module stays the user's: weights
    that an optimiser changed, attributes that a script set, a layer that was exchanged reach the
    program at the next call, and buffers and attributes that a call changed reach the module.
    """

    def __init__(self, module: torch.nn.Module, *, verified: bool, rtol: float | None) -> None:
        super().__init__(
            module,
            methods=("forward",),
            report=new_report(module),
            checks=True,
            precision="highest",
        )
        # A program must not keep the module alive that it belongs to.
        self._reference, self._source = weakref.ref(module), weakref.proxy(module)
        self._wanted: gradients.Wanted | None = None
        self._changed_numbers: set[str] = set()
        self._python_changes: list[Any] = []
        self._tree = state_tree(module)
        self._frame = _frame_of(self._tree, module)
        # States that only switches lead to and from, which come back, and their versions.
        self._known_frames: list[tuple[Any, int]] = []
        self._keys = {name: _key_of(t) for name, t in self._tree.leaves.items()}
        if verified:
            self._verifier = verify.Verifier(self, self._source, rtol)

    @property
    def methods_compiled(self) -> set[str]:
        """The methods that have become programs."""
        return {signature.method for signature in self._cache}

    @property
    def _user(self) -> torch.nn.Module:
        module = self._reference()
        assert module is not None, "called by the module itself"
        return module

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the user's module as a program.

        Raises:
            PortError: the code cannot be ported exactly, or its result differs from eager's.
        """
        check_signature(self._user, method, args, kwargs)
        self._take_in()
        before = self._values()
        self._python_changes.clear()
        out = self._call(method, args, kwargs)
        self._give_back(before)
        return out

    # -- what the user's module holds --------------------------------------------------------------

    def _take_in(self) -> None:
        """Take over what changed in the user's module since the last call."""
        tree = state_tree(self._user, self._program.numbers)
        frame = _frame_of(tree, self._user)
        if frame != self._frame:
            tree = self._take_structure(tree)
            frame = _frame_of(tree, self._user)
        for name, leaf in tree.leaves.items():
            self._take_leaf(name, leaf, name in tree.registered)
        self._tree, self._frame = tree, frame

    def _take_structure(self, tree: StateTree) -> StateTree:
        """Another attribute, layer or hook is another program.

        A number that keeps changing becomes state of one.
        """
        again = [
            name
            for name in _changed_numbers(self._tree, tree)
            if name in self._changed_numbers or self._changed_numbers.add(name)
        ]
        for name in again:
            self._promote_number(name, tree.values[name])
            self._state_changes[name] = self._state_changes.get(name, 0) + 1
        if again:
            tree = state_tree(self._user, self._program.numbers)
        if not again or _frame_of(tree, self._user) != self._frame:
            self._state_changes.update(dict.fromkeys(_named(_differences(self._tree, tree)), 1))
        self._program.master = clone_module(self._user, lambda t: t)[0]
        frame = _frame_of(tree, self._user)
        if _are_switches(self._tree, tree) and frame[1:3] == self._frame[1:3]:
            self._switch(frame)
        else:
            self._new_version()
        trainable = {n for n, p in self._user.named_parameters() if p.requires_grad}
        values = {n: v for n, v in self._values().items() if n in tree.leaves}
        self.params = {n: v for n, v in values.items() if n in trainable}
        self.buffers = {n: v for n, v in values.items() if n not in trainable}
        return tree

    def _new_version(self) -> None:
        super()._new_version()
        self._known_frames.clear()

    def _switch(self, frame: Any) -> None:
        """Training mode, say, after evaluation: the programs of a state that has been fit again."""
        if not self._known_frames:
            self._known_frames.append((self._frame, self._state_version))
        for known, version in self._known_frames:
            if known == frame:
                self._state_version = version
                return
        self._state_version = next(self._versions)
        self._known_frames.append((frame, self._state_version))

    def _take_leaf(self, name: str, leaf: Any, registered: bool) -> None:
        if not isinstance(leaf, torch.Tensor):
            if name in self._program.numbers:
                self.buffers[name] = jax.numpy.asarray(leaf)
            return
        if registered and not is_tagged(leaf):
            tag(leaf)
        key = _key_of(leaf)
        known = name in self.params or name in self.buffers
        if self._keys.get(name) == key and (known or not registered):
            return
        first = name not in self._keys
        self._keys[name] = key
        if not registered and not known and first:
            return  # a plain attribute is a host constant until something changes it
        trainable = isinstance(leaf, torch.nn.Parameter) and leaf.requires_grad
        if not known:
            self._new_version()
        (self.params if trainable else self.buffers)[name] = backend.to_jax(leaf)

    # -- what a call changed -----------------------------------------------------------------------

    def _apply_python_state(self, compiled: Any, changes: Any) -> None:
        super()._apply_python_state(compiled, changes)
        self._python_changes.append(changes)

    def _give_back(self, before: dict[str, Any]) -> None:
        """Give the user's module what the call changed."""
        for changes in self._python_changes:
            self._give_python_state(changes)
        if self._python_changes:
            self._tree = state_tree(self._user, self._program.numbers)
        for name, value in self._values().items():
            leaf = self._tree.leaves.get(name)
            if before.get(name) is value or leaf is None:
                continue
            if isinstance(leaf, torch.Tensor):
                self._give_tensor(name, leaf, value)
            elif name in self._program.numbers:
                fqn, attribute = self._tree.owners[name]
                vars(self._user.get_submodule(fqn))[attribute] = type(leaf)(value)
        if self._python_changes:
            self._frame = _frame_of(self._tree, self._user)
            self._keys |= {n: _key_of(t) for n, t in self._tree.leaves.items()}

    def _give_tensor(self, name: str, leaf: torch.Tensor, value: jax.Array) -> None:
        new = backend.to_torch(value, leaf.dtype)
        owner = self._tree.owners.get(name)
        if name in self._tree.registered or owner is None:
            with torch.no_grad():
                leaf.copy_(new)
        else:
            # A plain attribute was bound to another tensor: who holds the old one keeps it.
            fqn, attribute = owner
            leaf = vars(self._user.get_submodule(fqn))[attribute] = tag(new)
        self._keys[name] = _key_of(leaf)

    def _give_python_state(self, changes: Any) -> None:
        """Set attributes of the user's modules as the call left them on the ported copy."""
        if changes.replacement is not None:
            raise PortError(
                f"{type(self._user).__name__} exchanges submodules while it is called",
                code="TPU405",
                remedy="leave this class to eager PyTorch: porting(eager=(...)), or --eager",
            )
        master = self.module
        names = {id(leaf): name for name, leaf in state_tree(master).leaves.items()}
        values = self._values()

        def back(tensor: torch.Tensor) -> torch.Tensor:
            known = self._tree.leaves.get(names.get(id(tensor), ""))
            if isinstance(known, torch.Tensor) and tensor is not known and known.is_leaf:
                same = tensor.shape == known.shape and tensor.dtype == known.dtype
                if same and names[id(tensor)] in self._tree.registered:
                    return known
            value = values.get(names.get(id(tensor), ""))
            return tensor if value is None else gradients.host_tensor(value, tensor.dtype)

        cloner = Cloner(back)
        for fqn, module in master.named_modules():
            cloner.memo[id(module)] = self._user.get_submodule(fqn)
        for name in changes.names:
            fqn, attribute = changes.owners[name]
            theirs, ours = self._user.get_submodule(fqn), master.get_submodule(fqn)
            for holder in ("_parameters", "_buffers", "__dict__"):
                new = getattr(ours, holder)
                old = getattr(theirs, holder)
                if attribute in new:
                    old[attribute] = cloner.clone(new[attribute])
                else:
                    old.pop(attribute, None)

    def _path_of(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Other sizes take the same path; evaluation and training, or another option, do not.
        spec = arguments.take_apart((args, kwargs))[1]
        return method, spec.key, self._state_version, torch.is_grad_enabled()

    # -- running -----------------------------------------------------------------------------------

    def _result(self, value: Any, meta: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value
        made = arguments.from_program(value, meta)
        if not isinstance(made, torch.Tensor):
            return made
        return gradients.host_tensor(made.jax(), made.dtype)  # type: ignore[attr-defined]

    def _run(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], key: jax.Array | None
    ) -> tuple[Any, dict[str, Any]]:
        wanted, tensors = self._differentiated(args, kwargs)
        self._wanted = wanted if tensors else None
        prepared = self._prepare(method, args, kwargs, key)
        if not tensors:
            with prepared.timing:
                results = prepared.compiled.run(prepared.picked, prepared.key, prepared.values)
            return self._finish(prepared, results), prepared.state
        call = gradients.Call(prepared, wanted)
        flows = gradients.Through.apply(call, *tensors)
        return self._finish(prepared, call.results(list(flows))), prepared.state

    def _variant(self) -> Any:
        return self._wanted

    def _transformed(self, pure: Any, paths: list[str]) -> Any:
        if self._wanted is None:
            return pure
        registered = self._tree.registered

        def labels(state: Any, written: Any, put: Any, code: Any) -> dict[str, Any]:
            del code
            found = {f"the attribute {n!r}": v for n, v in state.items() if n not in registered}
            found |= {f"the argument {paths[int(i)]}": v for i, v in written.items()}
            return found | {f"an object among the arguments ({i})": v for i, v in enumerate(put)}

        return gradients.differentiable(pure, self._wanted, labels)

    def _differentiated(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[gradients.Wanted, list[torch.Tensor]]:
        """What autograd wants gradients for in this call."""
        if not torch.is_grad_enabled():
            return ((), ()), []
        leaves, _, _ = arguments.take_apart((args, kwargs))
        named = {n: t for n, t in self._tree.leaves.items() if n in self.params}
        indices = [
            i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        tensors = [*named.values(), *(leaves[i] for i in indices)]
        return (tuple(named), tuple(indices)), tensors

    def _differentiates(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bool(self._differentiated(args, kwargs)[1])

    def _gradient_parity(self, expected: Any, out: Any, module: Any) -> list[Any]:
        """Compare the gradients of a random projection of the outputs, parameter by parameter."""
        theirs = dict(module.named_parameters())
        ours = {n: t for n, t in self._tree.leaves.items() if n in self.params}
        totals = []
        for value in (expected, out):
            leaves = enumerate(structure.flatten(value)[0])
            totals.append(
                [(t * gradients.projection(t, i)).sum() for i, t in leaves if _has_graph(t)]
            )
        if not any(totals):
            return []
        # Without a graph on one side the gradients of the other have to be zero.
        want = _gradients(totals[0], [theirs[name] for name in ours])
        have = _gradients(totals[1], list(ours.values()), retain_graph=True)
        pairs = zip(ours, want, have, strict=True)
        none = torch.zeros(())
        filled: list[tuple[str, Any, Any]] = [
            (name, none if w is None else w, none if h is None else h) for name, w, h in pairs
        ]
        return verify.gradient_records(self._verifier, filled)


def _gradients(totals: list[Any], of: list[Any], **options: Any) -> Sequence[Any]:
    if not totals:
        return [None] * len(of)
    return torch.autograd.grad(totals, of, allow_unused=True, **options)


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _key_of(leaf: Any) -> Any:
    """What is different once a tensor has another value, or None for a number."""
    if not isinstance(leaf, torch.Tensor):
        return None
    mark = mark_of(leaf)
    version = None if leaf.is_inference() else leaf._version
    where = (id(leaf),) if mark is None else (mark.serial, mark.writes)
    return (*where, version, leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype)


def _frame_of(tree: StateTree, module: torch.nn.Module) -> Any:
    """Everything about a module that makes another program when it changes."""
    hooks = [
        (name, tuple(owner._forward_hooks), tuple(owner._forward_pre_hooks))
        for name, owner in module.named_modules()
        if owner._forward_hooks or owner._forward_pre_hooks
    ]
    trained = [p.requires_grad for p in module.parameters()]
    return (tree.statics, tree.modules, hooks, trained)


def _differences(before: StateTree, after: StateTree) -> Iterator[str]:
    """Names of the Python state that is not what it was."""
    for name in dict.fromkeys([*before.statics, *after.statics]):
        if before.statics.get(name, ...) != after.statics.get(name, ...):
            yield name


def _named(changed: Iterator[str]) -> list[str]:
    """Names as a report says them: a mode that all modules share is one."""
    names = list(changed)
    rest = [name for name in names if name.rpartition(".")[2] != "training"]
    return rest if len(rest) == len(names) else ["training mode", *rest]


def _are_switches(before: StateTree, after: StateTree) -> bool:
    """Whether all that changed are attributes that are true or false, and what is trained."""
    return all(
        isinstance(tree.values.get(name), bool)
        for name in _differences(before, after)
        for tree in (before, after)
    )


def _changed_numbers(before: StateTree, after: StateTree) -> Iterator[str]:
    """Those that are Python numbers before and after, and not a switch."""
    for name in _differences(before, after):
        kinds = {type(before.values.get(name)), type(after.values.get(name))}
        if kinds in ({int}, {float}) and not isinstance(after.values[name], numbers.SYMBOLIC):
            yield name
