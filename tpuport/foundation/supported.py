"""The versions of torch, torchax and jax between which tpuport is tested."""

import importlib.metadata
import re
import warnings
from functools import cache

# The first version that works, and the first that is not tested. pyproject.toml has the same.
BOUNDS = {
    "torch": ("2.13", "2.14"),
    "torchax": ("0.0.14.dev20261026", "0.0.15"),
    "jax": ("0.10.2", "0.11"),
    "jaxlib": ("0.10.2", "0.11"),
}


class UntestedVersionWarning(UserWarning):
    """A package is installed in a version that tpuport is not tested with."""


def order(version: str) -> tuple[float, ...]:
    """Return what versions are compared by: release and nightly numbers, without a local part."""
    public = version.partition("+")[0]
    release, _, nightly = public.partition(".dev")
    numbers = [float(n) for n in re.findall(r"\d+", release)[:4]]
    return (*numbers, *[0.0] * (4 - len(numbers)), float(nightly) if nightly.isdigit() else 1e12)


def outside(name: str, version: str) -> str:
    """Return what is wrong with a version: empty if it is within the bounds, or unknown."""
    if name not in BOUNDS:
        return ""
    lowest, limit = BOUNDS[name]
    # A nightly build before the first version that is not tested may already differ like it.
    if order(version) < order(lowest) or order(version)[:4] >= order(limit)[:4]:
        return f"{name} {version} is not tested: tpuport is for {lowest} and newer, below {limit}"
    return ""


@cache
def warn_once() -> None:
    """Warn of installed packages that are outside of the bounds, once in a process."""
    for name in BOUNDS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # what needs it says so
        if found := outside(name, version):
            text = f'{found}. What to do: pip install "tpuport[jax]", or see tpuport doctor'
            warnings.warn(text, UntestedVersionWarning, stacklevel=4)
