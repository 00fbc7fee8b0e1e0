"""Ports PyTorch models to JAX and TPU, and proves that they compute the same function.

Importing this package loads neither torch nor jax: each name below is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from tpuport import loading
from tpuport.foundation.errors import ParityError, PortError, TpuportError
from tpuport.foundation.version import __version__ as __version__

if TYPE_CHECKING:
    from tpuport import ops
    from tpuport.aot.cache.compile_cache import compile_cache
    from tpuport.aot.cache.warmup import warmup
    from tpuport.aot.compile_for import CompileReport, compile_for
    from tpuport.aot.program_folder import export
    from tpuport.compat.porting import porting
    from tpuport.diagnosis.explain import Diagnosis, explain_error, explaining
    from tpuport.model.call_errors import CallErrors, errors_of
    from tpuport.model.cast import cast
    from tpuport.model.convert import convert
    from tpuport.model.ported_model import PortedModel
    from tpuport.model.precision_audit import precision_audit
    from tpuport.model.remat import remat
    from tpuport.model.stack_blocks import stack_blocks
    from tpuport.quantization.quantize import quantize
    from tpuport.reports.report import PortReport
    from tpuport.sharding.shard import shard
    from tpuport.tracing.attention.options import attention_options
    from tpuport.tracing.core.export import to_numpy, to_torch
    from tpuport.tracing.precision.policy import DtypePolicy
    from tpuport.verify.ports.verify_port import verify_port
    from tpuport.weights import load_checkpoint, open_checkpoint, save_checkpoint

__all__ = [
    "CallErrors", "CompileReport", "Diagnosis", "DtypePolicy", "ParityError", "PortError",
    "PortReport", "PortedModel", "TpuportError", "attention_options", "cast", "compile_cache",
    "compile_for", "convert", "errors_of", "explain_error", "explaining", "export",
    "load_checkpoint", "open_checkpoint", "ops", "porting", "precision_audit", "quantize",
    "remat", "save_checkpoint", "shard", "stack_blocks", "to_numpy", "to_torch",
    "verify_port", "warmup",
]  # fmt: skip


def __getattr__(name: str) -> object:
    value = globals()[name] = loading.load(name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
