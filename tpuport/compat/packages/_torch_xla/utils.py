"""`torch_xla.utils.utils`: walks over nested data, synthetic data and small helpers."""

import copy
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from types import FunctionType, ModuleType
from typing import Any

# From here on, each function and class is named and called as in torch_xla.


class Cleaner:
    """A function that is called when this object is deleted."""

    def __init__(self, func: Callable[[], Any]) -> None:
        self.func = func

    def __del__(self) -> None:
        self.func()


class LazyProperty:
    """A value that is made when it is first read."""

    def __init__(self, gen_fn: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] | None = gen_fn
        self._value: Any = None

    @property
    def value(self) -> Any:
        """Return the value."""
        if self._make is not None:
            self._value, self._make = self._make(), None
        return self._value


class TmpFolder:
    """A folder that goes when this object is deleted."""

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp()
        self.cleaner = Cleaner(lambda: shutil.rmtree(self.name))


class SampleGenerator:
    """An iterator of the same data, so many times."""

    def __init__(self, data: Any, sample_count: int) -> None:
        self._data, self._length, self._left = data, sample_count, sample_count

    def __iter__(self) -> "SampleGenerator":
        return SampleGenerator(self._data, self._length)

    def __len__(self) -> int:
        return self._length

    def __next__(self) -> Any:
        return self.next()

    def next(self) -> Any:
        """Return the data."""
        if self._left <= 0:
            raise StopIteration
        self._left -= 1
        return self._data


class FnDataGenerator:
    """An iterator of generated data with a target that a function gives."""

    def __init__(
        self,
        func: Callable[[Any], Any],
        batch_size: int,
        gen_tensor: Callable[..., Any],
        dims: Any = None,
        count: int = 1,
    ) -> None:
        self._given = (func, batch_size, gen_tensor, list(dims) if dims else [1], count)
        self._left = count

    def __len__(self) -> int:
        return self._given[-1]

    def __iter__(self) -> "FnDataGenerator":
        return FnDataGenerator(*self._given)

    def __next__(self) -> Any:
        return self.next()

    def next(self) -> Any:
        """Return the next data and target."""
        if self._left <= 0:
            raise StopIteration
        self._left -= 1
        func, size, make, dims, _ = self._given
        data = make(size, *dims)
        return data, func(data)


class DataWrapper:
    """A base class of data that knows its own tensors."""

    def get_tensors(self) -> Any:
        """Return the tensors, which are sent to the device."""
        raise NotImplementedError("The method is missing an implementation")

    def from_tensors(self, tensors: Any) -> Any:
        """Return the data with these tensors in place of its own."""
        raise NotImplementedError("The method is missing an implementation")


def for_each_instance(value: Any, select_fn: Callable[[Any], bool], fn: Any) -> None:
    """Call a function on each selected value in nested data, once for each object."""
    seen: set[int] = set()

    def visit(one: Any) -> None:
        if id(one) in seen:
            return
        seen.add(id(one))
        if select_fn(one):
            fn(one)
            return
        for child in _children(one):
            visit(child)

    visit(value)


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, (list, tuple, set)):
        yield from value
    elif isinstance(value, DataWrapper):
        yield from value.get_tensors()
    elif hasattr(value, "__dict__"):
        yield from list(vars(value).values())


def for_each_instance_rewrite(value: Any, select_fn: Callable[[Any], bool], fn: Any) -> Any:
    """Return nested data with the selected values replaced; tuples become lists."""
    return _rewritten(value, select_fn, fn, {})


def _rewritten(value: Any, select: Callable[[Any], bool], fn: Any, done: dict[int, Any]) -> Any:
    if id(value) in done:
        return done[id(value)]
    if select(value):
        result = done[id(value)] = fn(value)
        return result
    if isinstance(value, dict):
        result = done[id(value)] = {}
        for k, v in value.items():
            key = _rewritten(k, select, fn, done)
            result[key] = _rewritten(v, select, fn, done)
        return result
    if isinstance(value, (list, tuple)):
        result = done[id(value)] = []
        result.extend(_rewritten(one, select, fn, done) for one in value)
        return result
    if isinstance(value, set):
        return {_rewritten(one, select, fn, done) for one in value}
    if isinstance(value, DataWrapper):
        made = [_rewritten(one, select, fn, done) for one in value.get_tensors()]
        return value.from_tensors(made)
    if hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType, ModuleType)):
        result = done[id(value)] = copy.copy(value)
        for name, one in list(vars(result).items()):
            vars(result)[name] = _rewritten(one, select, fn, done)
        return result
    return value


def as_list(t: Any) -> Any:
    """Return a list or tuple as it is, and anything else in a list."""
    return t if isinstance(t, (tuple, list)) else [t]


def getenv_as(name: str, type: Any, defval: Any = None) -> Any:
    """Return an environment variable as a type."""
    found = os.environ.get(name)
    if found is None:
        return defval
    return bool(int(found)) if type is bool else type(found)


def check_env_flag(name: str, default: str = "") -> bool:
    """Return whether an environment variable says yes."""
    flag = os.getenv(name, default)
    return flag == "true" or (flag.isdigit() and int(flag) > 0)


def shape(inputs: Any) -> list[int]:
    """Return the lengths of nested lists, which must be equal on each level."""
    if not isinstance(inputs, (list, tuple)):
        return []
    below = [shape(one) for one in inputs]
    assert all(one == below[0] for one in below)
    return [len(inputs), *(below[0] if below else [])]


def flatten_nested_tuple(inputs: Any) -> tuple[Any, ...]:
    """Return the leaves of nested lists and tuples."""
    if not isinstance(inputs, (list, tuple)):
        return (inputs,)
    return tuple(leaf for one in inputs for leaf in flatten_nested_tuple(one))


def list_copy_append(ilist: Any, item: Any) -> list[Any]:
    """Return a copy of a list with an item more."""
    return [*ilist, item]


def null_print(*args: Any, **kwargs: Any) -> None:
    """Print nothing."""
    del args, kwargs


def eprint(*args: Any, **kwargs: Any) -> None:
    """Print to standard error."""
    print(*args, file=sys.stderr, **kwargs)  # noqa: T201


def get_print_fn(debug: Any = None) -> Any:
    """Return a function that prints if `debug`, or DEBUG, says so."""
    return eprint if (int(os.environ.get("DEBUG", "0")) if debug is None else debug) else null_print


def timed(fn: Callable[[], Any], msg: str = "", printfn: Any = eprint) -> Any:
    """Call a function, and print how long it took."""
    with TimedScope(msg, printfn or get_print_fn()):
        return fn()


class TimedScope:
    """A block that prints how long it took."""

    def __init__(self, msg: str = "", printfn: Any = eprint) -> None:
        self._message, self._print, self._error = msg, printfn or get_print_fn(), None

    def __enter__(self) -> None:
        self._begun = time.time()

    def __exit__(self, *error: object) -> None:
        if self._error is None:
            self._print(f"{self._message}{1000.0 * (time.time() - self._begun):.3f}ms")

    def set_error(self, error: Any) -> None:
        """Have nothing printed."""
        self._error = error


def get_free_tcp_ports(n: int = 1) -> list[int]:
    """Return numbers of ports that are free now."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(n)]
    for one in sockets:
        one.bind(("", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def parallel_work(num_workers: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of a function over arguments, which threads call."""
    with futures.ThreadPoolExecutor(max_workers=num_workers) as executor:
        return list(executor.map(fn, *args))
