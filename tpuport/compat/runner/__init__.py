"""`tpuport run`: scripts, their tracebacks and exit codes."""
