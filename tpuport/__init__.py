"""Ports PyTorch models to JAX and TPU, and proves that they compute the same function.

Importing this package loads neither torch nor jax: each name below is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

from tpuport.errors import MissingExtraError, ParityError, PortError, TpuportError

if TYPE_CHECKING:
    from tpuport import ops
    from tpuport.model.convert import convert
    from tpuport.model.ported import PortedModel
    from tpuport.model.report import PortReport
    from tpuport.model.structure import to_numpy, to_torch
    from tpuport.running.porting import porting

__version__ = "0.1.0"

__all__ = [
    "ParityError",
    "PortError",
    "PortReport",
    "PortedModel",
    "TpuportError",
    "convert",
    "ops",
    "porting",
    "to_numpy",
    "to_torch",
]

_MODULE_OF = {
    "PortReport": "tpuport.model.report",
    "PortedModel": "tpuport.model.ported",
    "convert": "tpuport.model.convert",
    "ops": "tpuport.ops",
    "porting": "tpuport.running.porting",
    "to_numpy": "tpuport.model.structure",
    "to_torch": "tpuport.model.structure",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tpuport' has no attribute {name!r}")
    try:
        module = importlib.import_module(_MODULE_OF[name])
    except ModuleNotFoundError as error:
        missing = MissingExtraError.from_import(f"tpuport.{name}", error)
        if missing is None:
            raise
        raise missing from None
    value = module if module.__name__ == f"tpuport.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
