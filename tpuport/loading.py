"""The module of each public name, loaded on first use so that `import tpuport` stays fast."""

import importlib

from tpuport.errors import MissingExtraError

MODULE_OF = {
    "CompileReport": "tpuport.program.report",
    "Diagnosis": "tpuport.diagnosis.explain",
    "DtypePolicy": "tpuport.model.precision.policy",
    "PortReport": "tpuport.model.report",
    "PortedModel": "tpuport.model.ported",
    "attention_options": "tpuport.model.attention_choice",
    "cast": "tpuport.model.precision.cast",
    "compile_cache": "tpuport.running.compile_cache",
    "compile_for": "tpuport.program.compiling",
    "convert": "tpuport.model.convert",
    "explain_error": "tpuport.diagnosis.explain",
    "explaining": "tpuport.diagnosis.explain",
    "load_checkpoint": "tpuport.checkpoints",
    "open_checkpoint": "tpuport.checkpoints",
    "ops": "tpuport.ops",
    "porting": "tpuport.running.porting",
    "precision_audit": "tpuport.model.precision.audit",
    "remat": "tpuport.model.remat_plan",
    "save_checkpoint": "tpuport.checkpoints",
    "shard": "tpuport.sharding.on_mesh",
    "stack_blocks": "tpuport.model.stack_blocks",
    "to_numpy": "tpuport.model.export",
    "to_torch": "tpuport.model.export",
    "warmup": "tpuport.running.warmup",
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
        module = importlib.import_module(MODULE_OF[name])
    except ModuleNotFoundError as error:
        missing = MissingExtraError.from_import(f"tpuport.{name}", error)
        if missing is None:
            raise
        raise missing from None
    return module if module.__name__ == f"tpuport.{name}" else getattr(module, name)
