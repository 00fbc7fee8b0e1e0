"""Checks of `tpuport doctor`: packages, devices, environment, compile cache, disk and memory."""
