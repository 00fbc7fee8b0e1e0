"""Training of ported models: a state, a step as one program, and the loop and input around them.

Each name is loaded when it is first used: worker processes that read samples need neither jax nor
torchax, and import this package.
"""

from typing import TYPE_CHECKING

from tpuport.foundation.imports import imported

if TYPE_CHECKING:
    from tpuport.tracing.core.gradient_paths import value_and_grad
    from tpuport.training.adapters.lightning import from_lightning
    from tpuport.training.adapters.transformers import from_training_arguments
    from tpuport.training.alternation import Alternating, alternating
    from tpuport.training.checkpoints import Checkpoints, Restored
    from tpuport.training.distributed import initialize
    from tpuport.training.input.batches import Batches
    from tpuport.training.input.buckets import Buckets
    from tpuport.training.loop import Profile, fit
    from tpuport.training.metric_writers import JsonLines, TensorBoard, WandB
    from tpuport.training.optimizers import from_torch
    from tpuport.training.preemption import Preempted
    from tpuport.training.state import TrainState
    from tpuport.training.step import TrainStep, make_train_step

_HOME = {
    "Alternating": "alternation", "Batches": "input.batches", "Buckets": "input.buckets",
    "Checkpoints": "checkpoints", "JsonLines": "metric_writers", "Preempted": "preemption",
    "Profile": "loop", "Restored": "checkpoints", "TensorBoard": "metric_writers",
    "TrainState": "tpuport.training.state",
    "TrainStep": "step", "WandB": "metric_writers", "alternating": "alternation", "fit": "loop",
    "from_lightning": "adapters.lightning", "from_torch": "optimizers",
    "from_training_arguments": "adapters.transformers", "initialize": "distributed",
    "make_train_step": "step", "value_and_grad": "tpuport.tracing.core.gradient_paths",
}  # fmt: skip

__all__ = [
    "Alternating", "Batches", "Buckets", "Checkpoints", "JsonLines", "Preempted", "Profile",
    "Restored", "TensorBoard", "TrainState", "TrainStep", "WandB", "alternating", "fit",
    "from_lightning", "from_torch", "from_training_arguments", "initialize", "make_train_step",
    "value_and_grad",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME[name]
    home = home if home.startswith("tpuport.") else f"{__name__}.{home}"
    value = getattr(imported(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
