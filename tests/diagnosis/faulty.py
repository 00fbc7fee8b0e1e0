"""Programs that plain torchax and `jax.jit` cannot run, each on one line of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torchax
from jax.sharding import NamedSharding, PartitionSpec

TABLE = torch.ones(3)
KEPT: list[torch.Tensor] = []


def branch(x: torch.Tensor):
    if x.sum() > 0:
        return x
    return -x


def item(x: torch.Tensor):
    return x * x.max().item()


def as_list(x: torch.Tensor):
    return x.tolist()


def size(x: torch.Tensor):
    return [x * i for i in range(x.sum().int())]


def tensor_of(x: torch.Tensor):
    return torch.tensor([x[0, 0], 1.0])


def index_by(a):
    return [1, 2][a]


def reshaped(a):
    return jnp.ones(4).reshape(a, -1)


def mask(x: torch.Tensor):
    return x[x > 0]


def nonzero(x: torch.Tensor):
    return x.nonzero()


def numpy_copy(x: torch.Tensor):
    return x.numpy()


def handed_to_numpy(x: torch.Tensor):
    return np.asarray(x)


def handed_to_torch(a):
    return torch.from_numpy(a)


def leak(x: torch.Tensor):
    KEPT.append(x * 2)
    return x


def use_leak(x: torch.Tensor):
    return x + torch.sin(KEPT[0])


def dropped(x: torch.Tensor):
    return torch.dropout(x, 0.5, True)


def mixed(x: torch.Tensor):
    return x + TABLE


def written(x: torch.Tensor):
    TABLE[0] = x[0, 0]
    return TABLE


def added(x: torch.Tensor):
    return TABLE.add_(x[0])


def to_jax():
    return torch.ones(3).to("jax")


def outside():
    with torchax.default_env():
        a = torch.ones(3, device="jax")
    return a + 1


def into_jax():
    return jax.jit(lambda a: a)(torch.ones(3))


def into_torch():
    return torch.sum(jnp.ones(3))  # pyright: ignore


def named_tuple(x: torch.Tensor):
    return torch.linalg.qr(x)


def window(x: torch.Tensor):
    return x * torch.hann_window(3)


def linear_dtypes():
    return torch.nn.Linear(2, 2).bfloat16()(torch.ones(2, 2))


def product_dtypes():
    return torch.ones(2, 2) @ torch.ones(2, 2).bfloat16()


def convolution_dtypes():
    return torch.nn.Conv1d(1, 1, 1)(torch.ones(1, 1, 2).half())


def target_dtype():
    return torch.nn.functional.cross_entropy(torch.ones(2, 2), torch.ones(2).int())


def added_dtypes():
    return jax.lax.add(jnp.ones(2), jnp.ones(2, jnp.int32))


def scanned_dtypes():
    return jax.lax.scan(lambda c, _: (c.astype(jnp.bfloat16), None), jnp.ones(2), None, 2)


def branch_dtypes():
    return jax.lax.cond(True, lambda: jnp.ones(2), lambda: jnp.ones(2, jnp.bfloat16))


def too_much():
    return jnp.zeros((2**45,), jnp.uint8)


def too_much_for_torch():
    return torch.empty(2**46)


def to_cuda():
    return torch.ones(2).cuda()


def donated():
    a = jnp.ones(4)
    a.delete()
    return a + 1


def two_devices():
    one, other = (jax.device_put(jnp.ones(4), device) for device in jax.devices()[:2])
    return one + other


def six_over_four():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    return jax.device_put(jnp.ones((6, 2)), NamedSharding(mesh, PartitionSpec("data")))
