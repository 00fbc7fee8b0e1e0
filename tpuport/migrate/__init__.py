"""Scripts that leave torch_xla: LibCST codemods, and the lists of what they did and left."""
