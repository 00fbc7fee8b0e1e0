"""Random programs of Python numbers and of int64 tensors, as source text, and their comparison."""

import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tpuport
from tpuport.foundation.errors import PortError

LIMITS = (0, 1, -1, 5, 100, 46341, -46341, 65536, 2**31 - 1, -(2**31), 2**30, -(2**30), 12345678)


def load(source: str, folder: Path, name: str) -> Callable[..., Any]:
    """Return the function `f` of a file with this source: rewriting reads the file."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f


def outcome(function: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> Any:
    """Return a result as a list on the CPU, or the exception."""
    try:
        result = tpuport.to_torch(function(*(a.clone() for a in args)))
    except Exception as error:  # the program's own, compared by its class
        return error
    return list(result) if isinstance(result, tuple) else [result]


def differing(function: Callable[..., Any], calls: list[tuple[torch.Tensor, ...]]) -> list[str]:
    """Return how a port differs from eager PyTorch in some calls; a PortError is no difference."""
    ported = tpuport.convert(function, verify=False)
    found = []
    for args in calls:
        want, have = outcome(function, args), outcome(ported, args)
        if isinstance(have, PortError):
            assert "64 bits" in str(have) or "2**53" in str(have) or "fit in 32" in str(have), have
        elif isinstance(want, Exception) or isinstance(have, Exception):
            if not isinstance(have, type(want)):
                found.append(f"{args}: {want!r} against {have!r}")
        elif not all(map(same, want, have)):
            found.append(f"{args}: {want} against {have}")
    return found


def same(want: Any, have: Any) -> bool:
    """Return whether two values are equal to the last bit."""
    if isinstance(want, torch.Tensor):
        return want.dtype == have.dtype and want.shape == have.shape and torch.equal(want, have)
    return want == have or (want != want and have != have)


# -- Python numbers --------------------------------------------------------------------------------

NUMBER_CALLS = [
    (torch.tensor([0.7, 2.45]), torch.tensor([7, -3])),
    (torch.tensor([0.1, -1.15]), torch.tensor([1000000, 2**31 - 1])),
    (torch.tensor([123.456, 1e-8]), torch.tensor([-(2**31), 12])),
]
_LEAVES = {"f": "a b 0.1 2.5 -3.0 1e-3", "i": "m n 3 -7 1000003 2"}
# F and I are floats and ints, N any number, Z a number that is not zero and J such an int.
_FORMS = {
    "f": (
        "(F + N);(F - N);(F * N);(N / Z);(F // Z);(F % Z);round(F, 1);round(F, 2);round(F, -1);"
        "abs(F);min(F, F);max(F, F);float(N);(-F);(F if N < N else F);(abs(F) ** 2);(abs(F) ** 0.5)"
    ).split(";"),
    "i": (
        "(I + I);(I - I);(I * I);(I // J);(I % J);int(F);round(F);abs(I);max(I, I);(I & 1023);"
        "(I ^ 21);(I | 5);(I >> 2);(I << 3);divmod(I, J)[0];divmod(I, J)[1];round(I, -1)"
    ).split(";"),
}


def expression(source: random.Random, depth: int, kind: str) -> str:
    """Return a random expression of floats ("f") or ints ("i")."""
    if not depth or source.random() < 0.1:
        return source.choice(_LEAVES[kind].split())
    text = ""
    for letter in source.choice(_FORMS[kind]):
        if letter in "FIN":
            inner = source.choice("fi") if letter == "N" else letter.lower()
            text += expression(source, depth - 1, inner)
        elif letter == "Z":
            text += source.choice(["0.3", "7.0", "-2.5", "3", "-7"])
        else:
            text += source.choice(["3", "-7", "997", "(abs(n) + 1)"]) if letter == "J" else letter
    return text


def number_program(seed: int, count: int = 6) -> str:
    """Return a program of numbers that are returned, and used as factor, bound and condition."""
    source = random.Random(seed)
    kinds = ["f", "i"] + [source.choice("fi") for _ in range(count - 2)]
    lines = [f"r{i} = {expression(source, 3, kind)}" for i, kind in enumerate(kinds)]
    names = ", ".join(f"r{i}" for i in range(count))
    body = [
        "a, b = x[0].item(), x[1].item()",
        "m, n = k[0].item(), k[1].item()",
        *lines,
        "part = torch.arange(6.0)[: int(r1) % 5].sum()",
        "side = 2.0 if r0 < r1 else 3.0",
        f"return {names}, torch.ones(2) * r0, torch.ones(2) * side, part",
    ]
    return "import torch\n\n\ndef f(x, k):\n" + "".join(f"    {line}\n" for line in body)


# -- int64 tensors ---------------------------------------------------------------------------------

_TENSOR_FORMS = """-A;A.abs();A.cumsum(0);A.sum();A.flip(0);A.clamp(-100, 1000);A.float().long()
A.sort().values;A.amax();A // 7;A % 997;A & 1023;A ^ 12345;A >> 3;A << 5;A * 2654435761;A * 1000003
A + 2**33;A - 2**31;A ** 2;A.prod();A.cumprod(0);A[1:];A[torch.tensor([0, 2, 1])];A.square()
A.view(-1, 1).squeeze(1);A.masked_fill(B > 3, -5);A.unsqueeze(0).expand(2, -1).sum(0);A.roll(1)
torch.cat([A, B]);A.gather(0, torch.tensor([1, 0]));torch.diff(A);A.fmod(17);A.remainder(-9)
torch.div(A, 5, rounding_mode="trunc");A.unfold(0, 2, 1).sum(-1);A.topk(2).values;A.int().long()
A.bitwise_not();A.eq(B).long().cumsum(0);A.max(0).values;A.sign()
A + B;A - B;A * B;torch.maximum(A, B);A ^ B;A & B;A | B;torch.where(A > B, A, B * 3)
(A > B).long() * A;torch.add(A, B, alpha=3);A.addcmul(B, B);A // (B.abs() + 1);A % (B.abs() + 1)
torch.stack([A, B]).amin(0);A.index_add(0, torch.tensor([0, 0]), B[:2]);torch.outer(A, B).sum(0)[:3]
A.scatter_add(0, torch.tensor([1, 0]), B[:2]);(A * B).sum();torch.full_like(A, 2**34) + A
A * torch.tensor([1, 2654435761, 805459861])""".replace("\n", ";").split(";")
_STATEMENTS = (
    "{t} = A.clone(); {t}[0] = B.sum()",
    "{t} = A.clone(); {t} += B",
    "{t} = A.clone(); {t}[1:] *= 3",
    "{t} = A.clone(); {t}[A > 3] = 2**20",
    "{t} = torch.zeros_like(A); {t} ^= A * 805459861",
    "{t} = A * 2 if A.sum() > 0 else A - 1",
    "{t} = A + A.sum().item() % 5",
)


def tensor_program(seed: int) -> str:
    """Return a program of int64 tensors that eager PyTorch runs on small numbers."""
    source = random.Random(seed)
    small = (torch.tensor([4, 0, 9]), torch.tensor([3, 8, 1]))
    while True:
        text = _tensor_program(source)
        space: dict[str, Any] = {}
        exec(text, space)  # the text above is all that it runs
        if not isinstance(outcome(space["f"], small), Exception):
            return text


def _tensor_program(source: random.Random) -> str:
    names, lines = ["x", "z"], []
    for index in range(source.choice([3, 4, 5, 6])):
        name, a, b = f"v{index}", source.choice(names[-3:]), source.choice(names)
        form = source.choice(_STATEMENTS) if source.random() < 0.15 else ""
        form = form or "{t} = " + source.choice(_TENSOR_FORMS)
        lines.append(form.replace("A", a).replace("B", b).replace("{t}", name))
        names.append(name)
    lines.append(f"return {', '.join(names[2:])}")
    return "import torch\n\n\ndef f(x, z):\n" + "".join(f"    {line}\n" for line in lines)


def tensor_calls(seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the arguments of three calls: small numbers, then twice some near the limits."""
    source = random.Random(seed)
    yield tuple(torch.tensor([source.randint(1, 9) for _ in range(3)]) for _ in "xz")
    for _ in range(2):
        yield tuple(torch.tensor([source.choice(LIMITS) for _ in range(3)]) for _ in "xz")
