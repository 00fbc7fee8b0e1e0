"""The module of each public name, loaded on first use so that `import tpuport` stays fast."""

from tpuport.foundation.errors import MissingExtraError
from tpuport.foundation.imports import imported
from tpuport.foundation.supported import warn_once

MODULE_OF = {
    "CallErrors": "tpuport.model.call_errors",
    "CompileReport": "tpuport.aot.report",
    "Diagnosis": "tpuport.diagnosis.explain",
    "DtypePolicy": "tpuport.tracing.precision.policy",
    "PortReport": "tpuport.reports.report",
    "PortedModel": "tpuport.model.ported_model",
    "attention_options": "tpuport.tracing.attention.options",
    "cast": "tpuport.model.cast",
    "compile_cache": "tpuport.aot.cache.compile_cache",
    "compile_for": "tpuport.aot.compile_for",
    "convert": "tpuport.model.convert",
    "errors_of": "tpuport.model.call_errors",
    "explain_error": "tpuport.diagnosis.explain",
    "explaining": "tpuport.diagnosis.explain",
    "export": "tpuport.aot.program_folder",
    "load_checkpoint": "tpuport.weights",
    "open_checkpoint": "tpuport.weights",
    "ops": "tpuport.ops",
    "porting": "tpuport.compat.porting",
    "precision_audit": "tpuport.model.precision_audit",
    "quantize": "tpuport.quantization.quantize",
    "remat": "tpuport.model.remat",
    "save_checkpoint": "tpuport.weights",
    "shard": "tpuport.sharding.shard",
    "stack_blocks": "tpuport.model.stack_blocks",
    "to_numpy": "tpuport.tracing.core.export",
    "to_torch": "tpuport.tracing.core.export",
    "verify_port": "tpuport.verify.ports.verify_port",
    "warmup": "tpuport.aot.cache.warmup",
}


def load(name: str) -> object:
    """Import the module that defines a public name, and return the name's value.

    Raises:
        AttributeError: tpuport has no such name.
        MissingExtraError: the packages that it needs are not installed.
    """
    if name not in MODULE_OF:
        raise AttributeError(f"module 'tpuport' has no attribute {name!r}")
    try:
        module = imported(MODULE_OF[name])
    except ModuleNotFoundError as error:
        missing = MissingExtraError.from_import(f"tpuport.{name}", error)
        if missing is None:
            raise
        raise missing from None
    warn_once()
    return module if module.__name__ == f"tpuport.{name}" else getattr(module, name)
