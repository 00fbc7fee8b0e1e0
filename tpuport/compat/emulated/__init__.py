"""The emulated device: tensors, autocast, gradients, process groups, module programs."""
