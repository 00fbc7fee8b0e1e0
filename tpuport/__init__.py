"""Ports PyTorch models to JAX and TPU, and proves that they compute the same function.

Importing this package loads neither torch nor jax: each name below is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

from tpuport.errors import MissingExtraError, ParityError, PortError, TpuportError

if TYPE_CHECKING:
    from tpuport import ops
    from tpuport.checkpoints import load_checkpoint, open_checkpoint, save_checkpoint
    from tpuport.checkpoints import load_checkpoint, open_checkpoint, save_checkpoint
    from tpuport.model.convert import convert
    from tpuport.model.ported import PortedModel
    from tpuport.model.report import PortReport
    from tpuport.model.structure import to_numpy, to_torch
    from tpuport.running.porting import porting

__version__ = "0.1.0"

__all__ = [
    "ParityError", "PortError", "PortReport", "PortedModel", "TpuportError", "convert",
    "load_checkpoint", "open_checkpoint", "ops", "porting", "save_checkpoint", "to_numpy",
    "to_torch",
]  # fmt: skip

_NAMES_IN = {
    "tpuport.checkpoints": ("load_checkpoint", "open_checkpoint", "save_checkpoint"),
    "tpuport.model.convert": ("convert",),
    "tpuport.model.ported": ("PortedModel",),
    "tpuport.model.report": ("PortReport",),
    "tpuport.model.structure": ("to_numpy", "to_torch"),
    "tpuport.ops": ("ops",),
    "tpuport.running.porting": ("porting",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}


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
