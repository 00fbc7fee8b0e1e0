"""Random ops: the numbers cannot be eager's, their distribution has to be.

Each draw is compared with as many numbers that eager PyTorch draws, by the distance of the two
empirical distributions, and has eager's shape and dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
N = 4000
BF16 = torch.bfloat16
Run = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Draw:
    """A random op.

    Attributes:
        op: The registered overload or packet.
        run: Calls of the op; given a [N] tensor of zeros.
    """

    op: Any
    run: tuple[Run, ...]

    def __str__(self) -> str:
        return str(self.op).removeprefix("aten.")


def draw(op: Any, *run: Run) -> Draw:
    return Draw(op, run)


def _rates(x: torch.Tensor) -> torch.Tensor:
    return x + 2.5


_FROM = getattr(aten.random, "from")
_P = torch.tensor([0.1, 0.6, 0.3])

DRAWS = [
    draw(aten.rand, lambda x: aten.rand.default([N]), lambda x: aten.rand.default([N], dtype=BF16)),
    draw(
        aten.randn, lambda x: aten.randn.default([N]),
        lambda x: aten.randn.default([N, 2], dtype=BF16),
    ),
    draw(
        aten.rand_like, lambda x: aten.rand_like.default(x),
        lambda x: aten.rand_like.default(x.bfloat16()),
    ),
    draw(
        aten.randn_like, lambda x: aten.randn_like.default(x),
        lambda x: aten.randn_like.default(x, dtype=BF16),
    ),
    draw(aten.randint.default, lambda x: aten.randint.default(7, [N])),
    draw(aten.randint.low, lambda x: aten.randint.low(-3, 4, [N], dtype=torch.float32)),
    draw(
        aten.randint_like.default, lambda x: aten.randint_like.default(x, 5),
        lambda x: aten.randint_like.default(x, 5, dtype=torch.int32),
    ),
    draw(aten.randint_like.low_dtype, lambda x: aten.randint_like.low_dtype(x, -3, 4)),
    draw(
        aten.random.default, lambda x: aten.random.default(x.to(torch.int32)),
        lambda x: aten.random.default(x.bool()), lambda x: aten.random.default(x.to(torch.uint8)),
        lambda x: aten.random.default(x.to(torch.int8)), lambda x: aten.random.default(x),
        lambda x: aten.random.default(x.bfloat16()),
    ),
    draw(
        aten.random.to, lambda x: aten.random.to(x, 9),
        lambda x: aten.random.to(x.to(torch.int32), 9),
    ),
    draw(_FROM, lambda x: _FROM(x, -3, 4), lambda x: _FROM(x.to(torch.int32), 5, None)),
    draw(aten.randperm, lambda x: aten.randperm.default(N)),
    draw(
        aten.uniform, lambda x: aten.uniform.default(x, -2.0, 5.0),
        lambda x: aten.uniform.default(x.bfloat16()),
    ),
    draw(
        aten.normal_functional.default, lambda x: aten.normal_functional.default(x, 2.0, 3.0),
        lambda x: aten.normal_functional.default(x.bfloat16()),
    ),
    draw(aten.normal.Tensor_Tensor, lambda x: aten.normal.Tensor_Tensor(x + 2, x + 3)),
    draw(aten.normal.Tensor_float, lambda x: aten.normal.Tensor_float(x + 2, 3.0)),
    draw(aten.normal.float_Tensor, lambda x: aten.normal.float_Tensor(2.0, x + 3)),
    draw(aten.normal.float_float, lambda x: aten.normal.float_float(2.0, 3.0, [N])),
    draw(
        aten.bernoulli.default, lambda x: aten.bernoulli.default(x + 0.3),
        lambda x: aten.bernoulli.default((x + 0.3).bfloat16()),
    ),
    draw(aten.bernoulli.p, lambda x: aten.bernoulli.p(x, 0.3)),
    draw(
        aten.bernoulli.Tensor, lambda x: aten.bernoulli.Tensor(x, torch.tensor(0.3)),
        lambda x: aten.bernoulli.Tensor(x.to(torch.int64), x + 0.3),
    ),
    draw(
        aten.native_dropout.default, lambda x: aten.native_dropout.default(x + 1, 0.25, True)[0],
        lambda x: aten.native_dropout.default(x + 1, 0.25, False)[0],
        lambda x: aten.native_dropout.default(x + 1, 1.0, True)[0],
    ),
    draw(
        aten.exponential.default, lambda x: aten.exponential.default(x, 2.0),
        lambda x: aten.exponential.default(x.bfloat16(), 2.0),
    ),
    draw(aten.cauchy.default, lambda x: aten.cauchy.default(x, 1.0, 2.0)),
    draw(aten.log_normal.default, lambda x: aten.log_normal.default(x, 0.5, 0.4)),
    draw(
        aten.geometric.default, lambda x: aten.geometric.default(x, 0.3),
        lambda x: aten.geometric.default(x.to(torch.int64), 0.3),
    ),
    draw(aten.poisson.default, lambda x: aten.poisson.default(_rates(x))),
    draw(aten.binomial.default, lambda x: aten.binomial.default(x + 9, x + 0.3)),
    draw(aten._standard_gamma.default, lambda x: aten._standard_gamma.default(_rates(x))),
    draw(
        aten._sample_dirichlet.default,
        lambda x: aten._sample_dirichlet.default(_rates(x).reshape(-1, 4)),
    ),
    draw(
        aten.multinomial.default, lambda x: aten.multinomial.default(_P, N, True),
        lambda x: aten.multinomial.default(_P.expand(N // 2, 3) + x[: N // 2, None], 2),
    ),
    draw(
        aten.rrelu_with_noise.default,
        lambda x: aten.rrelu_with_noise.default(x - 1, torch.zeros(N), 0.1, 0.5, True),
    ),
    draw(
        aten.rrelu_with_noise_.default,
        lambda x: aten.rrelu_with_noise_.default(x - 1, torch.zeros(N), 0.1, 0.5, True),
    ),
]  # fmt: skip

# With a generator of its own a draw takes another stream of keys.
GENERATED = {
    aten.randint.generator: lambda g: aten.randint.generator(7, [N], generator=g),
    aten.randint.low_generator: lambda g: aten.randint.low_generator(-3, 4, [N], generator=g),
    aten.randint_like.generator: lambda g: aten.randint_like.generator(
        torch.zeros(N), 5, generator=g
    ),
}
