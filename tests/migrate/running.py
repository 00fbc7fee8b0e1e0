"""Scripts run before and after their migration, and the losses of their steps."""

import builtins
import contextlib
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import tpuport
from tpuport.migrate.torch_xla import Migration, migrate
from tpuport.training.step import TrainStep

SEED = 0


@contextlib.contextmanager
def without_torch_xla() -> Iterator[None]:
    """Refuse every import of torch_xla."""
    whole = builtins.__import__

    def refused(name: str, *args: Any, **kwargs: Any) -> Any:
        assert name.partition(".")[0] != "torch_xla", f"imports {name}"
        return whole(name, *args, **kwargs)

    assert not [name for name in sys.modules if name.partition(".")[0] == "torch_xla"]
    builtins.__import__ = refused
    try:
        yield
    finally:
        builtins.__import__ = whole


@contextlib.contextmanager
def as_script(path: Path, *arguments: str) -> Iterator[None]:
    """Set what Python sets for a script, and forget the modules that it imports."""
    before, argv, known = list(sys.path), sys.argv, set(sys.modules)
    sys.argv, sys.path[:0] = [str(path), *arguments], [str(path.parent)]
    torch.manual_seed(SEED)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, before
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(str(path.parent.parent)) or name.startswith("torch_xla"):
                del sys.modules[name]


def original_losses(path: Path, *arguments: str) -> list[float]:
    """Run a script of torch_xla's users as `tpuport run` does, with the losses it steps on."""
    found: list[float] = []
    backward = torch.Tensor.backward

    def recorded(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        # A function mode calls it again, without gradients of its own.
        if "inside" in vars(recorded):
            backward(self, *args, **kwargs)
            return
        recorded.inside = True
        found.append(self.item())
        backward(self, *args, **kwargs)
        del recorded.inside

    with tpuport.porting(paths=[path.parent.parent]), as_script(path, *arguments):
        torch.Tensor.backward = recorded  # type: ignore[method-assign]
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            torch.Tensor.backward = backward  # type: ignore[method-assign]
    return found


def migrated_losses(path: Path, *arguments: str) -> list[float]:
    """Run a migrated script, with the losses of its training steps."""
    found: list[float] = []
    call = TrainStep.__call__

    def recorded(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
        state, metrics = call(self, *args, **kwargs)
        found.append(float(metrics["loss"]))
        return state, metrics

    TrainStep.__call__ = recorded  # type: ignore[method-assign]
    try:
        with without_torch_xla(), as_script(path, *arguments):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        TrainStep.__call__ = call  # type: ignore[method-assign]
    return found


def migrate_folder(texts: Mapping[str, str], folder: Path) -> dict[str, Migration]:
    """Write files to a folder and their migrations to another one beside it.

    Args:
        texts: The texts by file name.
        folder: Where to write `before` and `after`.
    """
    made: dict[str, Migration] = {}
    for name, text in texts.items():
        (folder / "before" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "before" / name).write_text(text, encoding="utf-8")
    given = {str(folder / "before" / name): text for name, text in texts.items()}
    for path, one in migrate(given).items():
        target = folder / "after" / Path(path).relative_to(folder / "before")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(one.after, encoding="utf-8")
        made[str(target.relative_to(folder / "after"))] = one
    return made


_INTEGERS = re.compile(r"torch\.zeros\(((?:[^()])*?), dtype=torch\.int64\)")
_NUMBERS = re.compile(r"torch\.zeros\((self\.batch_size, 3[^()]*)\)")


def small(text: str, steps: int) -> str:
    """Make an example of pytorch/xla small and its data random, in its own text."""
    text = _INTEGERS.sub(
        r"torch.randint(10, (\1,), generator=torch.Generator().manual_seed(2))", text
    )
    text = _NUMBERS.sub(r"torch.randn(\1, generator=torch.Generator().manual_seed(1))", text)
    for old, new in {
        "img_dim = 224": "img_dim = 16",
        "batch_size = 128": "batch_size = 16",
        "num_steps = 300": f"num_steps = {steps}",
        "seq_len = 512": "seq_len = 8",
        "num_steps: int = 200": f"num_steps: int = {steps}",
        "hidden_size: int = 1024": "hidden_size: int = 32",
        "vocab_size: int = 3200": "vocab_size: int = 64",
        "vocab_size: int = 32000": "vocab_size: int = 64",
    }.items():
        text = text.replace(old, new)
    return text
