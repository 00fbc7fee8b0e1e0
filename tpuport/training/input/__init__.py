"""The input of a step: batches of fixed shapes, read ahead, each process its own rows."""
