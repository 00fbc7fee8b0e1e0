"""Training of ported models: a state, a step as one program, and what stands around them."""

from tpuport.training.checkpoints import Checkpoints, Restored
from tpuport.training.optimisers import from_torch
from tpuport.training.state import TrainState
from tpuport.training.step import TrainStep, make_train_step

__all__ = ["Checkpoints", "Restored", "TrainState", "TrainStep", "from_torch", "make_train_step"]
