"""Upstream's own classes from an untouched checkout (tsb0601/projectt)."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tpuport
from tpuport.foundation.errors import UsageError

# Packages that upstream imports and its models do not need.
ABSENT = (
    *("torchvision", "wandb", "lmdb", "timm", "clip", "omegaconf", "easydict", "tqdm", "zmq"),
    "taming",
)

_open: dict[Path, contextlib.ExitStack] = {}


@contextlib.contextmanager
def checkout(folder: str | Path) -> Iterator[None]:
    """Make the packages of a checkout importable inside the block.

    Raises:
        UsageError: It is no checkout.
    """
    root = Path(folder).resolve()
    if not (root / "rqvae" / "models").is_dir():
        raise UsageError(
            f"{folder} is no checkout of MAE-DiT: it has no rqvae/models. What to do:"
            " git clone https://github.com/tsb0601/projectt, and give that folder"
        )
    if root in _open:
        yield
        return
    with contextlib.ExitStack() as stack:
        sys.path.insert(0, str(root))
        stack.callback(sys.path.remove, str(root))
        named = () if "rqvae" in sys.modules else ("rqvae",)
        stack.enter_context(tpuport.porting(*named, absent=ABSENT, port_modules=False))
        _open[root] = stack
        stack.callback(_open.pop, root)
        yield


def import_module(folder: str | Path, name: str) -> Any:
    """Import a module of a checkout.

    Its lazy imports are found only inside `checkout`, so use it there.
    """
    with checkout(folder):
        return importlib.import_module(name)
