"""Packages written for CUDA that tpuport provides while `porting()` is active, one file each.

Files with a leading underscore are not packages.
"""
