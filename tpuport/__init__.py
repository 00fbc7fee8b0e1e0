"""Ports PyTorch models to JAX and TPU, and proves that they compute the same function.

Importing this package loads neither torch nor jax: each name below is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from tpuport import loading
from tpuport.errors import ParityError, PortError, TpuportError
from tpuport.version import __version__ as __version__

if TYPE_CHECKING:
    from tpuport import ops
    from tpuport.checkpoints import load_checkpoint, open_checkpoint, save_checkpoint
    from tpuport.diagnosis.explain import Diagnosis, explain_error, explaining
    from tpuport.model.attention_choice import attention_options
    from tpuport.model.convert import convert
    from tpuport.model.export import to_numpy, to_torch
    from tpuport.model.ported import PortedModel
    from tpuport.model.precision.audit import precision_audit
    from tpuport.model.precision.cast import cast
    from tpuport.model.precision.policy import DtypePolicy
    from tpuport.model.remat_plan import remat
    from tpuport.model.report import PortReport
    from tpuport.model.stack_blocks import stack_blocks
    from tpuport.program.compiling import CompileReport, compile_for
    from tpuport.running.compile_cache import compile_cache
    from tpuport.running.porting import porting
    from tpuport.running.warmup import warmup
    from tpuport.sharding.on_mesh import shard

__all__ = [
    "CompileReport", "Diagnosis", "DtypePolicy", "ParityError", "PortError", "PortReport",
    "PortedModel", "TpuportError", "attention_options", "cast", "compile_cache", "compile_for",
    "convert", "explain_error", "explaining", "load_checkpoint", "open_checkpoint", "ops",
    "porting", "precision_audit", "remat", "save_checkpoint", "shard", "stack_blocks", "to_numpy",
    "to_torch", "warmup",
]  # fmt: skip


def __getattr__(name: str) -> object:
    value = globals()[name] = loading.load(name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
