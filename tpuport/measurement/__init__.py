"""`tpuport doctor --measure`: what a chip does, beside what the cost model says."""
