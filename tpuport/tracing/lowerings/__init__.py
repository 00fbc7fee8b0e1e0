"""Op lowerings: one file a family, each function registered by a decorator.

`lowering` registers a function on jax arrays (torch dtypes and Python scalars are passed unchanged;
a random op gets a `key`). Its result is converted to the shape and dtype that torch gives.
`special` registers a function on tensors, for ops that write state.
"""

import functools
import importlib
import pkgutil


@functools.cache
def load() -> None:
    """Import every lowering file of this folder."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
