"""The demo: two models ported without edits, compared with plain torchax and eager PyTorch."""

from tpuport.demo.story import run as run
