"""The modules of torch_xla that tpuport provides: its names, on the emulated accelerator."""
