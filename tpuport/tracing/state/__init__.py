"""The state of a module: tensors by fqn, Python attributes, hooks."""
