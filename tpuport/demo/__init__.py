"""What `tpuport demo` runs: two models ported as they are, beside plain torchax and eager."""

from tpuport.demo.story import run as run
