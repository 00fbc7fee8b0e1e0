"""Weights that torch and jax share: whoever writes them, the other keeps its own values."""

import ctypes
import io
import warnings
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.interop import shared_memory
from tpuport.training import make_train_step

SIZE = 256


def address(tensor: torch.Tensor) -> int:
    return torch._C._data_address(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def shared(tensor: torch.Tensor) -> tuple[jax.Array, np.ndarray]:
    array = shared_memory.to_jax(tensor)
    return array, np.array(array)


def loaded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that was saved and loaded: torch gives its storage no allocator."""
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


def by_storage(p: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p.storage()[3] = 9.0


def by_optimizer(p: torch.Tensor, **options: Any) -> None:
    p.grad = torch.ones_like(p)
    torch.optim.AdamW([p], lr=0.1, **options).step()


def by_state_dict(p: torch.Tensor) -> None:
    module = nn.Linear(SIZE, SIZE, bias=False)
    module.weight = p
    module.load_state_dict({"weight": torch.zeros(SIZE, SIZE)})


WAYS = {
    "data": lambda p: p.data.add_(1),
    "view": lambda p: p.data.view(-1)[5:].zero_(),
    "indices": lambda p: p.data.index_put_((torch.tensor([1]),), torch.tensor(5.0)),
    "out": lambda p: torch.add(torch.ones(SIZE, SIZE), 1, out=p.data),
    "init": lambda p: nn.init.normal_(p),
    "foreach": lambda p: torch._foreach_add_([p.data], 1.0),  # pyright: ignore[reportPrivateImportUsage]
    "optimizer": by_optimizer,
    "fused": lambda p: by_optimizer(p, fused=True),
    "state dict": by_state_dict,
    "numpy": lambda p: p.detach().numpy().fill(7),
    "array": lambda p: np.asarray(p.detach()).fill(2),
    "dlpack": lambda p: np.from_dlpack(p.detach()).fill(1),
    "torch dlpack": lambda p: torch.from_dlpack(p.detach()).fill_(1),
    "data_ptr": lambda p: ctypes.memset(p.data_ptr(), 1, 100),
    "storage": by_storage,
    "untyped storage": lambda p: p.untyped_storage().fill_(3),
    "its pointer": lambda p: ctypes.memset(p.untyped_storage().data_ptr(), 1, 100),
    "shared memory": lambda p: p.data.share_memory_().add_(1),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_write_to_the_original_is_not_seen(way: str):
    p = nn.Parameter(torch.randn(SIZE, SIZE))
    array, before = shared(p)
    assert array.unsafe_buffer_pointer() == address(p)
    again = shared_memory.to_torch(array)
    assert address(again) == address(p)
    with torch.no_grad():
        WAYS[way](p)
    assert not np.array_equal(p.detach().numpy(), before)
    assert np.array_equal(np.asarray(array), before)
    assert np.array_equal(again.numpy(), before)
    assert np.array_equal(shared_memory.to_torch(array).numpy(), before)


@pytest.mark.parametrize("way", WAYS)
def test_a_write_to_the_reference_is_not_seen(way: str):
    p = nn.Parameter(torch.randn(SIZE, SIZE))
    array, before = shared(p)
    reference = nn.Parameter(shared_memory.to_torch(array))
    with torch.no_grad():
        WAYS[way](reference)
    assert not np.array_equal(reference.detach().numpy(), before)
    assert np.array_equal(np.asarray(array), before)
    assert np.array_equal(p.detach().numpy(), before)


@pytest.mark.parametrize(
    "known",
    [
        lambda t: t.numpy(),
        np.asarray,
        np.from_dlpack,
        lambda t: np.asarray(memoryview(t.numpy())),
        lambda t: t.view(-1).numpy(),
    ],
)
def test_memory_that_an_array_of_numpy_knows_is_copied(known):
    tensor = torch.randn(SIZE, SIZE)
    there = known(tensor)
    array, before = shared(tensor)
    there[:] = 1
    assert tensor.eq(1).all()
    assert np.array_equal(np.asarray(array), before)


@pytest.mark.parametrize("kind", ["numpy's", "shared", "loaded", "a view", "bfloat16", "negated"])
def test_other_memory(kind: str):
    base = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
    tensor = {
        "numpy's": lambda: torch.from_numpy(base),
        "shared": lambda: torch.randn(SIZE, SIZE).share_memory_(),
        "loaded": lambda: loaded(torch.randn(SIZE, SIZE)),
        "a view": lambda: torch.randn(SIZE, 2 * SIZE)[:, 1::2],
        "negated": lambda: torch.randn(SIZE, SIZE, dtype=torch.cfloat).conj().imag,
        "bfloat16": lambda: torch.randn(SIZE, SIZE).bfloat16(),
    }[kind]()
    array, before = shared(tensor)
    assert np.array_equal(before.astype(np.float32), tensor.float().resolve_neg().numpy())
    base.fill(3)
    tensor.fill_(4)
    assert np.array_equal(np.asarray(array), before)
    assert shared_memory.to_torch(array).dtype is tensor.dtype


def test_donation_leaves_the_original():
    tensor = torch.randn(SIZE, SIZE)
    array, before = shared(tensor)
    jax.block_until_ready(jax.jit(lambda a: a * 2, donate_argnums=0)(array))
    assert np.array_equal(tensor.numpy(), before)


class MeanSquare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(SIZE, SIZE)
        self.register_buffer("seen", torch.zeros(SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x
        return self.line(x) + self.seen


def test_calls_and_training_leave_the_original():
    module, x = Writing(), torch.randn(SIZE, SIZE)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    ported = tpuport.convert(module, verify="always")
    for _ in range(2):
        ported(x)
    ported.verify(x)
    step = make_train_step(
        tpuport.convert(nn.Sequential(module.line, MeanSquare())), optimizer="sgd"
    )
    state = step.init()
    for _ in range(3):
        state = step(state, x)[0]
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    with torch.no_grad():
        module.line.weight.zero_()
    assert np.array_equal(np.asarray(ported.params["line.weight"]), before["line.weight"])


def test_a_first_call_with_comparison_makes_no_copy_of_the_weights():
    module, x = nn.Linear(SIZE, SIZE), torch.randn(3, SIZE)
    ported = tpuport.convert(module, args=(x,))
    assert ported.report.verified
    verifier = ported._verifier
    call = verifier.call("forward", (x,), {})
    at = []
    verifier.run(call, on_module=lambda m: at.append(address(m.weight)))
    assert at == [address(module.weight)]
    assert ported.params["weight"].unsafe_buffer_pointer() == at[0]
