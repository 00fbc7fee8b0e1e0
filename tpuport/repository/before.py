"""Runs before somebody else's script, in its process: stands in for data that is not there.

This file is copied beside its settings, `before.json`, and run by itself, in eager PyTorch and
under a port alike. Files that a script cannot find are made up, the same ones in each run. Writes
outside of the folders that it may write to are refused: by Python, which can say so, and where
Linux can, by it, which C++ and other processes cannot get around. What was made up, refused,
started or called is written to `seen.jsonl` in the folder of the run.

It is no sandbox: code that wants to get around it can.
"""

import builtins
import contextlib
import functools
import gzip
import hashlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpuport.repository.landlock import refuse_writes_outside

_MOST_OF_A_KIND = 40
_NUMBERS = 1 << 18
# Every vocabulary has as many tokens, and every set of classes ten.
_LARGEST_NUMBER = 64
_CLASSES, _IMAGES_OF_CLASS, _IMAGE_SIZE = 10, 8, 256
_TEXT_SIZE = 1 << 16
_SMALL_BATCH = 4
_TERMINAL = "24 rows of 80 columns"
_CHARACTERS = "".join(chr(n) for n in range(32, 127)) + "\n"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {
    "os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.truncate", "os.link", "os.symlink",
    "os.chmod", "os.chown", "shutil.rmtree", "shutil.move",
}  # fmt: skip
# What libraries write wherever they are used.
_CACHES = ("~/.config/matplotlib", "~/.triton", "/dev", "/proc/self")
# Those that are made if they are not there: Linux allows no place that is not.
_MADE = ("~/.cache",)
_MADE += tuple(
    os.environ[n] for n in ("HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME") if n in os.environ
)
_PROCESSES = {"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork"}
_CONNECTIONS = {"socket.connect", "socket.bind"}
# Python reports much else, each `id()` of a deep copy for one.
_WATCHED = {"open"} | _CHANGES | _PROCESSES | _CONNECTIONS
# The layout of the autoencoder of Stable Diffusion, with few channels: an eighth of the size, four
# channels.
_AUTOENCODER: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (8, 8, 8, 8),
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "sample_size": _IMAGE_SIZE,
}


class SeenRun:
    """What a script did that a person should know of.

    Args:
        folder: Where `seen.jsonl` and the made-up files go.
        writable: The folders that the script may write to.
    """

    def __init__(self, folder: Path, writable: Sequence[str]) -> None:
        self.folder = folder
        folders = (*writable, *_CACHES, *_MADE, folder, tempfile.gettempdir())
        self.writable = tuple(os.path.realpath(os.path.expanduser(path)) for path in folders)
        self.known: dict[str, set[str]] = {}
        self.busy = False

    def stop(self) -> None:
        """See nothing more: the script has ended, and this process goes on."""
        self.busy = True

    def note(self, kind: str, what: str, instead: str = "") -> None:
        """Write down a thing that was seen, once."""
        known = self.known.setdefault(kind, set())
        if what in known or len(known) >= _MOST_OF_A_KIND:
            return
        known.add(what)
        self.busy = True
        try:
            with builtins.open(self.folder / "seen.jsonl", "a") as file:
                file.write(json.dumps({"kind": kind, "what": what, "instead": instead}) + "\n")
        finally:
            self.busy = False

    def may_write(self, path: Any) -> bool:
        """Return whether a path lies in one of the folders that the script may write to."""
        if isinstance(path, int) or "__pycache__" in str(path):
            return True
        real = os.path.realpath(os.fsdecode(path))
        return any(real == one or real.startswith(one + os.sep) for one in self.writable)

    def watch(self, event: str, args: tuple[Any, ...]) -> None:
        """See what Python reports of files, processes and connections: `sys.addaudithook`.

        Raises:
            PermissionError: a write outside of the folders.
        """
        if event not in _WATCHED or self.busy:
            return
        if event == "open":
            if isinstance(args[2], int) and args[2] & _WRITES and args[0] is not None:
                self.check(args[0])
        elif event in _CHANGES:
            for path in args[:2] if event in ("os.rename", "shutil.move", "os.link") else args[:1]:
                self.check(path)
        elif event in _PROCESSES:
            self.note("process", event if event == "os.fork" else _shown(args))
        elif event in _CONNECTIONS:
            self.note("connection", str(args[1]))

    def check(self, path: Any) -> None:
        """Refuse a write outside of the folders.

        Raises:
            PermissionError: it is one.
        """
        if not isinstance(path, (str, bytes, os.PathLike)) or self.may_write(path):
            return
        name = os.fsdecode(path)
        self.note("refused write", name)
        raise PermissionError(f"tpuport port lets no script write outside of its copy: {name}")

    def made(self, path: Any, make: Callable[[Path], str], suffix: str = "") -> Any:
        """Return the path if there is such a file, else that of one that is made up.

        Args:
            path: What a script asks for.
            make: Writes it, and returns what it is in words.
            suffix: What its name has to end with.
        """
        if not isinstance(path, (str, os.PathLike)) or os.path.exists(path):
            return path
        name = os.fspath(path)
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
        target = self.folder / "made-up" / f"{digest}{suffix}"
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            self.note("made up", name, make(target))
        return str(target)


def _shown(args: tuple[Any, ...]) -> str:
    words = next((a for a in args if isinstance(a, (list, tuple))), args[:1])
    return " ".join(os.fsdecode(w) if isinstance(w, (str, bytes)) else str(w) for w in words)[:200]


def _generator(target: Path) -> np.random.Generator:
    return np.random.default_rng(int(target.stem, 16))


def make_numbers(dtype: Any, count: int) -> Callable[[Path], str]:
    """Return what writes random numbers of a dtype: small integers, or normal floats."""
    kind = np.dtype(dtype)

    def make(target: Path) -> str:
        random = _generator(target)
        if kind.kind == "f":
            values = random.standard_normal(count).astype(kind)
        else:
            values = random.integers(0, _LARGEST_NUMBER, count).astype(kind)
        values.tofile(target)
        return f"{count} random numbers ({kind})"

    return make


def make_text(target: Path) -> str:
    """Write random characters."""
    picked = _generator(target).integers(0, len(_CHARACTERS), _TEXT_SIZE)
    # Each character at least once: code that indexes them finds them all.
    target.write_text(_CHARACTERS + "".join(_CHARACTERS[n] for n in picked))
    return "random characters"


def make_images(target: Path) -> str:
    """Write a folder with folders of random images, one for each class."""
    from PIL import Image

    random = _generator(target)
    for name in range(_CLASSES):
        folder = target / f"class{name}"
        folder.mkdir(parents=True)
        for number in range(_IMAGES_OF_CLASS):
            pixels = random.integers(0, 256, (_IMAGE_SIZE, _IMAGE_SIZE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png", compress_level=0)
    return f"{_CLASSES} classes of {_IMAGES_OF_CLASS} random images"


class MadeUpBytes(io.BytesIO):
    """Random characters, as many as a text has, or as the first read asks for if that is more."""

    def __init__(self, name: str) -> None:
        self._random = np.random.default_rng(list(os.fsencode(name)))
        super().__init__(self._picked(_TEXT_SIZE))

    def _picked(self, count: int) -> bytes:
        characters = np.frombuffer(_CHARACTERS.encode(), np.uint8)
        return characters[self._random.integers(0, len(characters), count, np.uint8)].tobytes()

    def read(self, size: int | None = -1, /) -> bytes:
        """Read so many bytes, or all."""
        missing = (size or 0) - len(self.getbuffer())
        if missing > 0 and self.tell() == 0:
            self.seek(0, io.SEEK_END)
            self.write(self._picked(missing))
            self.seek(0)
        return super().read(size)


def stand_in_for_archives(seen: SeenRun) -> None:
    """Make `gzip.open` find characters where there is no file, such as the one of enwik8."""
    real = gzip.open

    @functools.wraps(real)
    def open_(filename: Any, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        is_path = isinstance(filename, (str, os.PathLike))
        if not is_path or not mode.startswith("r") or os.path.exists(filename):
            return real(filename, mode, *args, **kwargs)
        name = os.fspath(filename)
        seen.note("made up", name, "random characters")
        made = MadeUpBytes(name)
        return io.TextIOWrapper(made, encoding="ascii") if "t" in mode else made

    place: Any = gzip
    place.open = open_


def stand_in_for_files(seen: SeenRun) -> None:
    """Make `numpy.memmap`, `numpy.fromfile` and `open` find files of numbers and text."""
    real_map, real_file, real_open = np.memmap, np.fromfile, builtins.open

    class memmap(real_map):
        """The class of numpy, which finds made-up files too."""

        def __new__(
            cls, filename: Any, dtype: Any = np.uint8, mode: Any = "r+", *args: Any, **kwargs: Any
        ) -> Any:
            if mode in ("r", "c", "readonly", "copyonwrite"):
                shape = kwargs.get("shape", args[1] if len(args) > 1 else None)
                count = _NUMBERS if shape is None else int(np.prod(shape))
                filename = seen.made(filename, make_numbers(dtype, count))
            return real_map.__new__(cls, filename, dtype, mode, *args, **kwargs)

    @functools.wraps(real_file)
    def fromfile(file: Any, dtype: Any = float, count: int = -1, *args: Any, **kwargs: Any) -> Any:
        wanted = _NUMBERS if count < 0 else count
        return real_file(
            seen.made(file, make_numbers(dtype, wanted)), dtype, count, *args, **kwargs
        )

    @functools.wraps(real_open)
    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode in ("r", "rt") and isinstance(file, (str, os.PathLike)) and _is_text(file):
            file = seen.made(file, make_text)
        return real_open(file, mode, *args, **kwargs)

    memmap.__module__ = "numpy"
    places: Any = (np, builtins)
    places[0].memmap, places[0].fromfile, places[1].open = memmap, fromfile, open_


def _is_text(file: Any) -> bool:
    return os.fspath(file).endswith(".txt") and "requirements" not in os.path.basename(file)


def stand_in_for_torchvision(seen: SeenRun) -> None:
    """Make the data sets of torchvision find random images."""
    datasets = importlib.import_module("torchvision.datasets")

    folder_init = datasets.DatasetFolder.__init__

    @functools.wraps(folder_init)
    def init(self: Any, root: Any, *args: Any, **kwargs: Any) -> None:
        folder_init(self, seen.made(root, make_images), *args, **kwargs)

    patched: Any = datasets.DatasetFolder
    patched.__init__ = init
    for name, shape, classes in (
        ("CIFAR10", (32, 32, 3), 10),
        ("CIFAR100", (32, 32, 3), 100),
        ("MNIST", (28, 28), 10),
        ("FashionMNIST", (28, 28), 10),
    ):
        _replace_small(seen, getattr(datasets, name), shape, classes)


def _replace_small(seen: SeenRun, dataset: Any, shape: tuple[int, ...], classes: int) -> None:
    """Let a data set of one file have random images if it cannot be read or fetched."""
    import torch

    base, real = importlib.import_module("torchvision.datasets").VisionDataset, dataset.__init__

    @functools.wraps(real)
    def init(self: Any, root: Any, train: bool = True, *args: Any, **kwargs: Any) -> None:
        if type(self) is not dataset:
            return real(self, root, train, *args, **kwargs)
        try:
            return real(self, root, train, *args, **kwargs)
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0][:80]
        transforms = dict(zip(("transform", "target_transform"), args, strict=False)) | {
            name: value for name, value in kwargs.items() if name != "download"
        }
        base.__init__(self, root, **transforms)
        random = np.random.default_rng(classes)
        images = random.integers(0, 256, (512, *shape), dtype=np.uint8)
        targets = random.integers(0, classes, 512)
        gray = len(shape) == 2
        self.train, self.classes = train, [str(n) for n in range(classes)]
        # That of MNIST is a property, which computes it.
        if not isinstance(getattr(dataset, "class_to_idx", None), property):
            self.class_to_idx = {name: n for n, name in enumerate(self.classes)}
        self.data = torch.from_numpy(images) if gray else images
        self.targets = torch.from_numpy(targets) if gray else targets.tolist()
        seen.note("made up", f"{dataset.__name__} ({reason})", "512 random images")

    dataset.__init__ = init


def stand_in_for_diffusers(seen: SeenRun) -> None:
    """Let the autoencoder of Stable Diffusion have random weights if it cannot be fetched."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    real = AutoencoderKL.from_pretrained

    @functools.wraps(real)
    def from_pretrained(name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return real(name, *args, **kwargs)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0][:80]
        seen.note("made up", f"{name} ({reason})", "a small autoencoder of random weights")
        return AutoencoderKL(**_AUTOENCODER)

    patched: Any = AutoencoderKL
    patched.from_pretrained = staticmethod(from_pretrained)


def stand_in_for_terminal(seen: SeenRun) -> None:
    """Let a script that asks for the size of its terminal find one: a run has none."""
    real_size, real_popen = os.get_terminal_size, os.popen

    @functools.wraps(real_size)
    def get_terminal_size(*args: Any) -> os.terminal_size:
        try:
            return real_size(*args)
        except OSError:
            # Python's own `shutil` knows what to do without one.
            if sys._getframe(1).f_globals.get("__name__") == "shutil":
                raise
        seen.note("terminal", "os.get_terminal_size()", _TERMINAL)
        return os.terminal_size((80, 24))

    @functools.wraps(real_popen)
    def popen(cmd: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(cmd, str) and cmd.split() == ["stty", "size"] and not os.isatty(0):
            seen.note("terminal", cmd, _TERMINAL)
            return io.StringIO("24 80\n")
        return real_popen(cmd, *args, **kwargs)

    place: Any = os
    place.get_terminal_size, place.popen = get_terminal_size, popen


def turn_autocast_off(seen: SeenRun) -> None:
    """Let regions of autocast compute in the dtype of their inputs.

    Eager PyTorch and a port round sixteen bits differently, so that equal functions look unequal.
    """
    from torch.amp.autocast_mode import autocast

    real = autocast.__init__

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if args[2] if len(args) > 2 else kwargs.get("enabled", True):
            device = args[0] if args else kwargs.get("device_type")
            seen.note("autocast off", f"autocast of {device}", "the dtypes of the inputs")
        real(self, *(args[:2] + args[3:]), **{**kwargs, "enabled": False})

    patched: Any = autocast
    patched.__init__ = init


def check_saved_files(seen: SeenRun) -> None:
    """Say which file `torch.save` may not write: it opens files in C++."""
    import torch

    place: Any = torch
    real = place.save

    @functools.wraps(real)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        seen.check(f)
        real(obj, f, *args, **kwargs)

    place.save = save


def load_in_one_process(seen: SeenRun) -> None:
    """Let data loaders have no processes of their own, and nothing that needs some."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader
    real = loader.__init__
    place = list(inspect.signature(real).parameters).index("num_workers") - 1
    without = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    without |= {"timeout": 0, "multiprocessing_context": None}

    @functools.wraps(real)
    def init(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("num_workers") or any(args[place - 1 : place]):
            seen.note("workers", "the processes of data loaders", "none")
            args = args[: place - 1] + ((0,) if len(args) >= place else ()) + args[place:]
            changed = {n: v for n, v in without.items() if n in kwargs}
            kwargs = {**kwargs, **changed}
        real(self, dataset, *args, **kwargs)

    loader.__init__ = init


def make_batches_smaller(seen: SeenRun, sizes: Sequence[int]) -> None:
    """Let data loaders give small batches instead of those of some sizes."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader
    real = loader.__init__

    @functools.wraps(real)
    def init(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        size = args[0] if args else kwargs.get("batch_size")
        if isinstance(size, int) and size in sizes and size > _SMALL_BATCH:
            seen.note("batches", str(size), str(_SMALL_BATCH))
            args = (_SMALL_BATCH, *args[1:]) if args else ()
            kwargs = kwargs if args else {**kwargs, "batch_size": _SMALL_BATCH}
        real(self, dataset, *args, **kwargs)

    loader.__init__ = init


def send_no_run(seen: SeenRun) -> None:
    """Let runs of wandb go nowhere, whatever mode the script asks for."""
    wandb: Any = importlib.import_module("wandb")
    real, mode = wandb.init, os.environ["WANDB_MODE"]

    @functools.wraps(real)
    def init(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, "mode": mode})

    wandb.init = init


_MODULES = {
    "torchvision.datasets": stand_in_for_torchvision,
    "diffusers.models.autoencoders.autoencoder_kl": stand_in_for_diffusers,
}


class AfterImports:
    """Changes modules once the script imports them, and only then.

    Args:
        seen: What the script did.
        modules: The modules by name, and what sets up for each.
    """

    def __init__(self, seen: SeenRun, modules: dict[str, Callable[[SeenRun], None]]) -> None:
        self._seen, self._waiting = seen, dict(modules)
        for name in [name for name in modules if name in sys.modules]:
            self._waiting.pop(name)(seen)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return how a module is loaded that is waited for; None for any other."""
        set_up = self._waiting.pop(name, None)
        spec: Any = None if set_up is None else importlib.util.find_spec(name)
        if set_up is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            set_up(self._seen)

        spec.loader.exec_module = exec_module
        return spec


def prepare() -> SeenRun:
    """Set everything up, as `before.json` says."""
    settings = json.loads(Path(__file__).with_name("before.json").read_text())
    folder = Path(globals().get("FOLDER") or Path(__file__).parent)
    seen = SeenRun(folder, settings["writable"])
    if not settings["workers"]:
        load_in_one_process(seen)
    if settings["batches"]:
        make_batches_smaller(seen, settings["batches"])
    if not settings["autocast"]:
        turn_autocast_off(seen)
    modules = dict(_MODULES) if settings["made_up"] else {}
    modules["torch"] = check_saved_files
    if settings["quiet"]:
        modules["wandb"] = send_no_run
    if settings["made_up"]:
        stand_in_for_files(seen)
        stand_in_for_terminal(seen)
        stand_in_for_archives(seen)
    finder: Any = AfterImports(seen, modules)
    sys.meta_path.insert(0, finder)
    for cache in _MADE:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.expanduser(cache), exist_ok=True)
    sys.addaudithook(seen.watch)
    refuse_writes_outside(seen.writable)
    return seen


if __name__ == "__before__":
    SEEN = prepare()
