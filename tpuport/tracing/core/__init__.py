"""The trace, its tensors, numbers, storages and views."""
