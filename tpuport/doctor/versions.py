"""The versions that tpuport is tested with, and checks of the installed ones."""

import re
from collections.abc import Iterator, Mapping

from tpuport.doctor.finding import Check, note, ok, problem
from tpuport.foundation.supported import outside

# The same as in constraints.txt; a test compares the two.
TESTED = {
    "torch": "2.13.0",
    "torchax": "0.0.14.dev20261026",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "libtpu": "0.0.42.1",
    "numpy": "2.4.6",
    "transformers": "5.23.0",
    "diffusers": "0.42.1",
}
PYTHON = (3, 11)
# Packages that porting needs and `pip install tpuport` leaves out.
NEEDED = ("torch", "torchax", "jax", "jaxlib", "numpy")
# Packages that interfere: their effect, and whether it is a problem.
_IN_THE_WAY = {
    "torch_xla": ("takes the TPU for itself, which torchax's jax then cannot have", True),
    "libtpu-nightly": ("installs a second libtpu, and either may be loaded", True),
}
# What lets jax use an NVIDIA GPU; `pip install "tpuport[gpu]"` has the last one.
GPU_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
LOOKED_FOR = (*TESTED, *_IN_THE_WAY, *GPU_PLUGINS, "torchvision", "filelock")
_WHEELS = "--index-url https://download.pytorch.org/whl"
# torchvision 0.15 was made for torch 2.0, and so on, one for one.
_VISION_AHEAD = 15

Versions = Mapping[str, str | None]


def check_python(version: tuple[int, ...]) -> Check:
    """Check Python's version."""
    shown = ".".join(map(str, version[:3]))
    if version[:2] < PYTHON:
        wanted = ".".join(map(str, PYTHON))
        return problem(
            "Python", f"{shown}; tpuport needs {wanted} or newer", f"python{wanted} -m venv .venv"
        )
    if version[:2] > PYTHON:
        return note("Python", f"{shown}; tpuport is tested with {PYTHON[0]}.{PYTHON[1]}")
    return ok("Python", shown)


def check_versions(installed: Versions, *, on_tpu: bool, on_gpu: bool = False) -> Iterator[Check]:
    """Check each package against the version that tpuport is tested with.

    Args:
        installed: Version by name; None or no entry for what is not installed.
        on_tpu: Whether this machine has a TPU.
        on_gpu: Whether it has an NVIDIA GPU, which jax may use where there is no TPU.
    """
    on_gpu = on_gpu and not on_tpu
    for name, tested in TESTED.items():
        have = installed.get(name)
        if have is None:
            yield _missing(name, on_tpu=on_tpu)
        elif _numbers(have) == _numbers(tested):
            yield ok(name, have)
        elif outside(name, have) and _numbers(have) > _numbers(tested):
            text = f"{outside(name, have)}; it is tested with {tested}"
            yield problem(name, text.removeprefix(f"{name} "), f"pip install {name}=={tested}")
        elif name in NEEDED and _numbers(have) < _numbers(tested):
            text = f"{have} is older than {tested}, which tpuport needs"
            yield problem(name, text, f"pip install {name}=={tested}")
        else:
            yield note(
                name, f"{have}; tpuport is tested with {tested}", f"pip install {name}=={tested}"
            )
    yield from _pairs(installed, on_gpu=on_gpu)
    yield from _plugins(installed, on_gpu=on_gpu)
    for name, (harm, serious) in _IN_THE_WAY.items():
        if installed.get(name) is not None:
            make = problem if serious else note
            yield make(name, f"{installed[name]} {harm}", f"pip uninstall -y {name}")


def _plugins(installed: Versions, *, on_gpu: bool) -> Iterator[Check]:
    """Check jax's plugins for GPUs: one of jaxlib's version where there is a GPU, else none."""
    found = {name: have for name in GPU_PLUGINS if (have := installed.get(name)) is not None}
    if not on_gpu:
        for name, have in found.items():
            text = f"{have} makes jax look for an NVIDIA GPU, which it is not to use here"
            yield note(name, text, f"pip uninstall -y {name}")
        return
    for name in list(found)[:-1]:
        text = f"{found.pop(name)} is beside {GPU_PLUGINS[-1]}: jax takes one of them only"
        yield problem(name, text, f"pip uninstall -y {name}")
    jaxlib = installed.get("jaxlib")
    for name, have in found.items():
        if jaxlib is None or _numbers(have) == _numbers(jaxlib):
            yield ok(name, f"{have}, with which jax uses the GPU")
        else:
            text = f"{have} and jaxlib {jaxlib} differ, so jax may leave the GPU alone"
            yield problem(name, text, f"pip install {name}=={jaxlib}")


def _missing(name: str, *, on_tpu: bool) -> Check:
    if name in NEEDED:
        text = "not installed: there is no porting without it (linting and rewriting work)"
        return problem(name, text, 'pip install "tpuport[jax]"')
    if name == "libtpu":
        make = problem if on_tpu else note
        text = "not installed: jax needs it to use a TPU, and to compile for one without it"
        return make(name, text, 'pip install "tpuport[tpu]"')
    return note(name, "not installed; some models need it", 'pip install "tpuport[recipes]"')


def _pairs(installed: Versions, *, on_gpu: bool) -> Iterator[Check]:
    """Check packages that have to fit each other."""
    jax, jaxlib = installed.get("jax"), installed.get("jaxlib")
    if jax and jaxlib and _numbers(jax) != _numbers(jaxlib):
        yield problem("jax and jaxlib", f"{jax} and {jaxlib} differ", f"pip install jaxlib=={jax}")
    torch = installed.get("torch")
    if torch is None:
        return
    # Where there is a GPU, people run their code on it, and compare.
    if not on_gpu and ("+cu" in torch or "+rocm" in torch):
        text = f"{torch} brings gigabytes for GPUs that tpuport does not use; the CPU build will do"
        yield note("torch's build", text, f"pip install torch=={_plain(torch)} {_WHEELS}/cpu")
    vision = installed.get("torchvision")
    if vision is None:
        return
    wanted = f"0.{_numbers(torch)[1] + _VISION_AHEAD}"
    build = _build(torch) if on_gpu else "cpu"
    fix = f"pip install torchvision=={wanted}.*" + (f" {_WHEELS}/{build}" if build else "")
    if not f"{vision}.".startswith(f"{wanted}."):
        yield problem(
            "torchvision", f"{vision} is not made for torch {torch}: importing fails", fix
        )
    elif _build(vision) != _build(torch):
        yield problem("torchvision", f"{vision} and torch {torch} are of different builds", fix)
    else:
        yield ok("torchvision", vision)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", _plain(version))))


def _plain(version: str) -> str:
    return version.partition("+")[0]


def _build(version: str) -> str:
    """Return `cpu` or `cu128`; it is empty for wheels of the package index, which are one build."""
    return version.partition("+")[2]
