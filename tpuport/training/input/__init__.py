"""What a step is given: batches of fixed shapes, read ahead, each process its own rows."""
