"""A differential fuzzer: random modules through `convert`, with eager PyTorch as the judge."""
