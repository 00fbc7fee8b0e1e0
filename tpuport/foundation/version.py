"""The version of tpuport."""

__version__ = "0.1.0"
