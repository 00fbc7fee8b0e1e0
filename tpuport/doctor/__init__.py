"""What `tpuport doctor` looks at: packages, devices, environment, compile cache, room."""
