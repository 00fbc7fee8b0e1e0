"""Cache reading in samples per second: upstream's gzip pickles and the recipe's two layouts.

`python -m benchmarks.recogdrive_cache` writes a few samples of the real size, and prints medians of
rounds that take turns, read from the page cache.
"""

import argparse
import gzip
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.recogdrive import layouts
from recipes.recogdrive.make_data import make_cache


def as_upstream_reads(entry: layouts.Entry) -> Any:
    """Read files that were written here with gzip and pickle alone, as upstream does."""
    found = {}
    for name in (layouts.FEATURE_FILE, layouts.TARGET_FILE):
        with gzip.open(entry.path / name) as file:
            found.update(pickle.load(file))
    return found


def main() -> None:
    """Write samples, measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made: dict[layouts.Layout, list[layouts.Entry]] = {}
        layout: layouts.Layout
        for layout in ("upstream", "safetensors"):
            made[layout] = make_cache(
                Path(folder) / layout, count=options.count, tokens=2800, width=1536, layout=layout
            )
        contestants: dict[str, tuple[Callable[..., Any], list[layouts.Entry]]] = {
            "upstream's loader, gzip pickles": (as_upstream_reads, made["upstream"]),
            "layouts, gzip pickles": (layouts.read_entry, made["upstream"]),
            "layouts, safetensors": (layouts.read_entry, made["safetensors"]),
        }
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(options.rounds):
            for name, (read, entries) in contestants.items():
                start = time.perf_counter()
                for entry in entries:
                    read(entry)
                rates[name].append(len(entries) / (time.perf_counter() - start))
        for name, (_, entries) in contestants.items():
            size = sum(f.stat().st_size for e in entries for f in _files(e)) / len(entries)
            rate = statistics.median(rates[name])
            print(f"{name:32} {rate:8.1f} samples/s  {size / 2**20:6.1f} MiB a sample")


def _files(entry: layouts.Entry) -> list[Path]:
    return list(entry.path.iterdir()) if entry.path.is_dir() else [entry.path]


if __name__ == "__main__":
    main()
