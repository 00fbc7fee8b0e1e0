"""Functions by which models ask for their place among parallel processes, answered for one.

Sizes are 1 and ranks 0, and there is one group, under a JAX mesh too: the model is written for one
device, and the partitioner spreads its program over the mesh.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from tpuport.foundation.errors import UsageError


class OnlyGroup:
    """A group of one process, with the methods of the group objects of xDiT and vLLM."""

    world_size = 1
    rank = local_rank = rank_in_group = 0
    first_rank = last_rank = 0
    is_first_rank = is_last_rank = True
    device_group = cpu_group = ulysses_group = ring_group = None
    ulysses_world_size = ring_world_size = 1
    ulysses_rank = ring_rank = 0

    def __init__(self, package: str, name: str) -> None:
        self._name = f"{package}.{name}()"
        self.ranks = [0]

    def all_gather(self, input_: torch.Tensor, dim: int = 0, separate_tensors: bool = False) -> Any:
        """Return the tensor, or a list of it."""
        del dim
        return [input_] if separate_tensors else input_

    def all_reduce(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the tensor."""
        del args, kwargs
        return input_

    reduce_scatter = all_to_all = broadcast = gather = all_reduce

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Return the object."""
        del src
        return obj

    def broadcast_object_list(self, obj_list: Any, src: int = 0, group: Any = None) -> Any:
        """Return the list."""
        del src, group
        return obj_list

    def barrier(self) -> None:
        """Do nothing: there is no other process to wait for."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"{self._name}.{name} is not provided by tpuport for a group of one process. What to"
            " do: guard it by the world size being greater than 1"
        )


class GroupTable:
    """A builder of the functions of a parallel-state module.

    Args:
        package: The package, for its options: `porting(package={"sizes": {"tensor_model_parallel":
            2}})` gives another size where a model builds one shard of itself.
        sizes: The sizes in those options.
    """

    def __init__(self, package: str, sizes: dict[str, int]) -> None:
        self.package, self.sizes = package, dict(sizes)
        self.functions: dict[str, Any] = {}
        self._known: set[str] = set()

    def answers(self, value: Any, *names: str) -> None:
        """Add functions that return a value, whatever their arguments."""
        for name in names:
            self.functions[name] = _answering(name, value)

    def dimensions(self, names: Iterable[str], group: Any = None) -> None:
        """Add `get_X_world_size`, `get_X_rank` and `get_X_group` of each X."""
        for name in names:
            self._known.add(name)
            self.answers(int(self.sizes.get(name, 1)), f"get_{name}_world_size")
            self.answers(0, f"get_{name}_rank")
            self.answers(group, f"get_{name}_group")

    def initializers(self, *names: str) -> None:
        """Add functions that take sizes, all of which must be 1 or the size in the options."""
        for name in names:
            self.functions[name] = self._initializing(name)

    def _initializing(self, name: str) -> Callable[..., None]:
        def initialize(*args: Any, **kwargs: Any) -> None:
            named = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
            for key, value in named.items():
                is_size = isinstance(value, int) and not isinstance(value, bool)
                allowed = self.sizes.get(key.removesuffix("_size").removesuffix("_degree"), 1)
                if is_size and value > 1 and value != allowed:
                    raise UsageError(
                        f"{self.package}: {name}({key}={value}) asks for more than one process."
                        " What to do: set it to 1; tpuport spreads the program over a mesh"
                    )

        initialize.__name__ = name
        return initialize

    def finish(self) -> dict[str, Any]:
        """Return the functions, and a clear error for a name that is not among them."""
        for name in set(self.sizes) - self._known:
            raise UsageError(
                f"porting({self.package}=...): no size is called {name!r}. What to do: name one of"
                f" {', '.join(sorted(self._known))}"
            )
        return {**self.functions, "__getattr__": self._missing}

    def _missing(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refusing(self.package, name)


def _answering(name: str, value: Any) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return value

    answer.__name__ = name
    return answer


def _refusing(package: str, name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise UsageError(
            f"{package}: {name} is not provided by tpuport, which answers for one process only."
            " What to do: keep the program from calling it"
        )

    refuse.__name__ = name
    return refuse
