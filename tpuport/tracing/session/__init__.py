"""One trace from start to end: activation, inputs and outputs, restarts."""
