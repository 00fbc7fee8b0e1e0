"""What rounds of a loop change, as the rounds that a trace has run show it.

Variables of a loop are what its body takes and returns, and the places that it changes: items of
lists and dicts, and attributes, of what its function reaches. A cache is often one.
"""

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import jax
import torch

from tpuport.foundation import pytree
from tpuport.foundation.pytree.children import Children, children, refill
from tpuport.foundation.pytree.snapshot import Snapshot
from tpuport.tracing.control_flow.merge import branch_leaf
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.storage import Flow
from tpuport.tracing.core.tensor import TracedTensor, wrap
from tpuport.tracing.core.values import flow_of
from tpuport.tracing.dynamic_shapes.extents import extents_of


@dataclass(frozen=True)
class Plain:
    """A number or tensor at the start of a loop: what each round adds to it, or to its size.

    Attributes:
        start: The number, or the sizes of the tensor.
        step: What a round adds to the number, or to the size along `dim`.
        dim: The dim along which a tensor grows; None for a number and a tensor that does not.
        dtype: The dtype of a tensor, None for a number.
        flow: Whether derivatives pass through a tensor.
        unlike_number: As a tensor has it that eager has a number for on some path.
    """

    start: Any
    step: int = 0
    dim: int | None = None
    dtype: torch.dtype | None = None
    flow: Flow = field(default=Flow.STOPPED, compare=False)
    unlike_number: Any = field(default=None, compare=False)

    def wrapped(self, value: jax.Array, trace: Trace) -> TracedTensor:
        """Return a tensor with the value that the variable has."""
        assert self.dtype is not None
        made = wrap(value, self.dtype, trace=trace, flow=self.flow)
        made._unlike_number = self.unlike_number
        return made

    def size(self, rounds: int) -> int:
        """Return the size along `dim` after some rounds."""
        assert self.dim is not None
        return self.start[self.dim] + self.step * rounds


class Place(NamedTuple):
    """Where a value is held: the number of its container or object, and which part or attribute."""

    holder: int
    part: int | None
    name: str


@dataclass(frozen=True)
class Appended:
    """What each round appends to a list.

    Attributes:
        holder: The number of the list among what the functions reach.
        spec: The structure of the items of one round.
        items: Their tensors and numbers. A number's `step` is from one round to the next.
        alike: Whether derivatives pass through each of them as they did in the round before.
        is_read: Whether a round reads the list, too.
    """

    holder: int
    spec: pytree.TreeSpec
    items: tuple[Plain, ...]
    alike: tuple[bool, ...]
    is_read: bool = False


@dataclass(frozen=True)
class Growth:
    """How rounds change the variables of a loop.

    Attributes:
        peel: How many rounds run before those that are alike.
        variables: The variables that the body takes, then the values in `places`; None if they are
            not known yet.
        places: The places that each round changes.
        lists: The lists that each round appends to.
        why: Why the loop is not one program.
        ends: Whether a traced value may end the loop.
    """

    peel: int = 0
    variables: list[Plain] | None = None
    places: tuple[Place, ...] = ()
    lists: tuple[Appended, ...] = ()
    why: str = ""
    ends: bool = False

    @property
    def is_longer(self) -> bool:
        """Return whether a round makes a tensor longer."""
        return any(one.dim is not None for one in self.variables or ())


class Surroundings:
    """What a round may change besides the variables: all that its functions reach.

    It also notes the variables and what is reached before the first and after each round.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], operands: Any = ()) -> None:
        self.cells = _cells(functions)
        self.held = [cell.cell_contents for cell in self.cells]
        # `append = found.append`, and methods of objects.
        bound = [getattr(one, "__self__", None) for one in (*functions, *self.held)]
        self.defaults = _defaults((*functions, *self.held))
        self.snapshot = Snapshot([*self.held, *bound, *self.defaults, operands])
        self.operands = [operands]
        self.states = [[before for _, before in self.snapshot.saved]]

    @property
    def has_iterator(self) -> bool:
        """Return whether it reaches an iterator, whose position nothing shows."""
        return any(isinstance(value, Iterator) for value, _ in self.snapshot.saved)

    def turned(self, variables: Sequence[Any]) -> Callable[[], bool]:
        """Return what tells whether a tensor among these or what is reached is turned in place.

        That is by `t_`, `unsqueeze_` and the like, which change what the object is a view of.
        """
        values = [*variables, *self.held, *(part for one in self.states[0] for part in one.all)]
        before = [(one, one._chain) for one in values if isinstance(one, TracedTensor)]
        return lambda: any(one._chain is not chain for one, chain in before)

    def note(self, operands: Any) -> None:
        """Note how a round has left things."""
        self.operands.append(operands)
        self.states.append(self._now())

    def _now(self) -> list[Children]:
        return [children(value) for value, _ in self.snapshot.saved]

    def changed(self) -> set[Place] | None:
        """Return the places that have changed; None if something else has."""
        return self._places([self.states[0], self._now()])

    def written(self) -> set[int]:
        """Return the ids of the containers and objects that have changed."""
        now = zip(self.snapshot.saved, self._now(), strict=True)
        return {id(value) for (value, before), after in now if not before.is_same(after)}

    def located(self, places: Iterable[Place]) -> list[tuple[int, int | None, str]]:
        """Return some places by the ids of their holders; numbers count in one walk only."""
        return [(id(self.snapshot.saved[p.holder][0]), p.part, p.name) for p in places]

    def placed(self, located: Iterable[tuple[int, int | None, str]]) -> list[Place] | None:
        """Return what `located` gave elsewhere by numbers; None if a holder is not reached here."""
        numbers = {id(value): n for n, (value, _) in enumerate(self.snapshot.saved)}
        located = list(located)
        if any(holder not in numbers for holder, *_ in located):
            return None
        return [Place(numbers[holder], part, name) for holder, part, name in located]

    def _places(
        self, states: list[list[Children]], longer: set[int] | None = None
    ) -> set[Place] | None:
        """Return the places that differ between states; None if something else does.

        `longer` gets the lists that only got longer, which are something else without it.
        """
        pairs = zip(self.cells, self.held, strict=True)
        if any(not _is_bound(cell) or cell.cell_contents is not held for cell, held in pairs):
            return None
        found: set[Place] = set()
        for index, (first, *later) in enumerate(zip(*states, strict=True)):
            for other in later:
                if first.is_same(other):
                    continue
                if longer is not None and _is_longer(first, other):
                    longer.add(index)
                    continue
                is_alike = first.keys == other.keys and first.held.keys() == other.held.keys()
                if not is_alike or len(first.parts) != len(other.parts):
                    return None
                parts = enumerate(zip(first.parts, other.parts, strict=True))
                items = {Place(index, i, "") for i, (a, b) in parts if a is not b}
                if items and not issubclass(first.kind, (list, dict)):
                    return None
                found |= items
                found |= {
                    Place(index, None, name)
                    for name, value in first.held.items()
                    if value is not other.held[name]
                }
        return found

    def read(self, places: Sequence[Place]) -> tuple[Any, ...]:
        """Return the values that are in some places now."""
        return tuple(_part(children(self.snapshot.saved[p.holder][0]), p) for p in places)

    def first(self, places: Sequence[Place]) -> tuple[Any, ...]:
        """Return the values that were in some places when this was made."""
        return tuple(_part(self.states[0][p.holder], p) for p in places)

    def has(self, places: Sequence[Place]) -> bool:
        """Return whether there are these places."""
        contents = self.states[0]
        return all(
            place.holder < len(contents)
            and (
                place.name in contents[place.holder].held
                if place.part is None
                else place.part < len(contents[place.holder].parts)
            )
            for place in places
        )

    def write(self, places: Sequence[Place], values: Sequence[Any]) -> None:
        """Put values into some places."""
        for place, value in zip(places, values, strict=True):
            holder = self.snapshot.saved[place.holder][0]
            content = children(holder)
            if place.part is None:
                content = content._replace(held=content.held | {place.name: value})
            else:
                parts = list(content.parts)
                parts[place.part] = value
                content = content._replace(parts=parts)
            refill(holder, content)

    def growth(self, peel: int) -> Growth:
        """Return how the rounds that were noted have changed the variables."""
        longer: set[int] = set()
        places = self._places(self.states, longer)
        lists = [self._appended(index) for index in sorted(longer)]
        known = [one for one in lists if one is not None]
        if self.has_iterator or places is None or len(known) < len(lists):
            what = "a round changes Python values that are no variables of the loop"
            return Growth(peel, why=what)
        order = tuple(sorted(places, key=str))
        states = [
            (tuple(operands), tuple(_part(content[p.holder], p) for p in order))
            for operands, content in zip(self.operands, self.states, strict=True)
        ]
        flat = [pytree.flatten(state, leaf=branch_leaf, shared=False) for state in states]
        if any(spec.key != flat[0][1].key for _, spec in flat):
            return Growth(peel, why="a variable gets another structure")
        found = [_change(list(seen)) for seen in zip(*(leaves for leaves, _ in flat), strict=True)]
        kept = [one for one in found if one is not None]
        if len(kept) < len(found):
            return Growth(peel, why="the rounds do not change the variables alike")
        return Growth(peel, kept, order, tuple(known))

    def list_at(self, index: int) -> tuple[list[Any], list[Place]] | None:
        """Return the list with this number, and the places that hold it besides variables.

        None if something else may hold it, such as a tuple, a default or a bound `append`.
        """
        found = self.snapshot.saved[index][0] if index < len(self.snapshot.saved) else None
        if type(found) is not list:
            return None
        values = [*self.held, *(part for state in self.states[0] for part in state.all)]
        bound = [getattr(one, "__self__", None) for one in values]
        if any(one is found for one in (*bound, *self.defaults)):
            return None
        others = set(map(id, _cells(values))) - set(map(id, self.cells))
        if any(id(cell) in others and cell.cell_contents is found for cell in _cells(values)):
            return None
        places = list(self._holding(found))
        kinds = {self.states[0][place.holder].kind for place in places if place.part is not None}
        return (found, places) if all(issubclass(one, (list, dict)) for one in kinds) else None

    def holders(self, places: Sequence[Place]) -> list[Any]:
        """Return the containers and objects of some places, with the attributes of objects."""
        found = [self.snapshot.saved[place.holder][0] for place in places]
        return [*found, *(vars(one) for one in found if hasattr(one, "__dict__"))]

    def _holding(self, value: Any) -> Iterator[Place]:
        for number, content in enumerate(self.states[0]):
            yield from (Place(number, i, "") for i, p in enumerate(content.parts) if p is value)
            yield from (Place(number, None, n) for n, v in content.held.items() if v is value)

    def _appended(self, index: int) -> Appended | None:
        """Return what each round has appended to a list; None if that is not known."""
        states = [state[index].parts for state in self.states]
        added = [later[len(first) :] for first, later in itertools.pairwise(states)]
        flat = [pytree.flatten(one, leaf=branch_leaf, shared=False) for one in added]
        if self.list_at(index) is None or any(spec.key != flat[0][1].key for _, spec in flat):
            return None
        columns = [list(seen) for seen in zip(*(leaves for leaves, _ in flat), strict=True)]
        known = [_change(seen) for seen in columns]
        items = tuple(one for one in known if one is not None and one.dim is None)
        alike = tuple(len({flow_of([one]) for one in seen}) == 1 for seen in columns)
        return Appended(index, flat[0][1], items, alike) if len(items) == len(known) else None


def copies() -> set[int]:
    """Return the ids of the containers in which snapshots hold what user code holds, too."""
    found: set[int] = set()
    for one in gc.get_objects():
        kind = type(one)
        if kind is Children:
            found |= {id(one), id(one.parts), id(one.held)}
        elif kind is Snapshot:
            found |= {id(one.roots), *map(id, one.saved)}
        elif kind is Surroundings:
            found |= {id(one.held), id(one.defaults)}
    return found


def _is_longer(first: Children, other: Children) -> bool:
    """Return whether a list has the same items as before, and more of them."""
    pairs = zip(first.parts, other.parts, strict=False)
    is_list = first.kind is list and len(other.parts) > len(first.parts)
    return is_list and all(a is b for a, b in pairs)


def _part(content: Children, place: Place) -> Any:
    return content.held[place.name] if place.part is None else content.parts[place.part]


def _change(seen: list[Any]) -> Plain | None:
    """Return how each round changes a variable, None where that is not one change."""
    first = seen[0]
    if any(type(one) is not type(first) for one in seen if not isinstance(one, torch.Tensor)):
        return None
    if isinstance(first, torch.Tensor):
        return _growth(seen) if all(isinstance(one, torch.Tensor) for one in seen) else None
    if type(first) is int:
        steps = {b - a for a, b in itertools.pairwise(seen)}
        return Plain(first, steps.pop()) if len(steps) == 1 else None
    is_known = type(first) in (bool, float) and len(set(map(repr, seen))) == 1
    return Plain(first) if is_known else None


def _growth(seen: list[torch.Tensor]) -> Plain | None:
    sizes = [tuple(torch.Tensor.size(one)) for one in seen]
    alike = len({(len(size), one.dtype) for size, one in zip(sizes, seen, strict=True)}) == 1
    if not alike or any(extents_of(one) for one in seen):
        return None
    flow = max(flow_of([one]) for one in seen)
    dims = [dim for dim, along in enumerate(zip(*sizes, strict=True)) if len(set(along)) > 1]
    if not dims:
        marks = (getattr(one, "_unlike_number", None) for one in seen)
        mark = next(filter(None, marks), None)
        return Plain(sizes[0], dtype=seen[0].dtype, flow=flow, unlike_number=mark)
    along = [size[dims[0]] for size in sizes]
    steps = {b - a for a, b in itertools.pairwise(along)}
    if len(dims) > 1 or len(steps) > 1 or min(steps) < 1:
        return None
    return Plain(sizes[0], steps.pop(), dims[0], seen[0].dtype, flow)


def _cells(functions: Sequence[Any]) -> list[CellType]:
    """Return the variables of the closures of functions, and of the functions in them."""
    found: dict[int, CellType] = {}
    pending = list(functions)
    while pending:
        one = pending.pop()
        one = one.__func__ if isinstance(one, MethodType) else one
        for cell in one.__closure__ or () if isinstance(one, FunctionType) else ():
            if id(cell) not in found and _is_bound(cell):
                found[id(cell)] = cell
                pending.append(cell.cell_contents)
    return list(found.values())


def _defaults(functions: Sequence[Any]) -> list[Any]:
    """Return the defaults of the arguments of those of some values that are functions."""
    plain = [one.__func__ if isinstance(one, MethodType) else one for one in functions]
    found = [one for one in plain if isinstance(one, FunctionType)]
    named = [value for one in found for value in (one.__kwdefaults__ or {}).values()]
    return [*(value for one in found for value in one.__defaults__ or ()), *named]


def _is_bound(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises
    except ValueError:
        return False
    return True
