"""How fast a ported model runs, traces and lowers beside the other ways to run it; `make bench`."""
