"""FSDP 1 of torch_xla on one replica: blocks that are computed again, and saved states."""

import pytest
import torch
from torch import nn

import tpuport


@pytest.fixture
def fsdp():
    """The module of FSDP 1, in a block in which torch_xla was imported."""
    with tpuport.porting(torch_xla={}):
        import torch_xla.distributed.fsdp as fsdp

        yield fsdp


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_function_on_the_device_is_computed_again(fsdp, reentrant):
    """torch asks for `torch.xla`, which there is none of, where it keeps random numbers."""
    import torch_xla.utils.checkpoint as xla

    x, w = torch.randn(3, 4), torch.randn(4, 5)

    def trained(call, device):
        a, b = (t.clone().to(device).requires_grad_() for t in (x, w))
        calls = []

        def body(u, v):
            calls.append(0)
            return nn.functional.dropout(torch.tanh(u @ v), 0.5)

        torch.manual_seed(1)
        out = call(body, a, b)
        out.square().sum().backward()
        return [t.detach().cpu() for t in (out, a.grad, b.grad)], len(calls)

    want, once = trained(lambda body, *args: body(*args), "cpu")
    again = lambda body, *args: xla.checkpoint(body, *args, use_reentrant=reentrant)  # noqa: E731
    got, twice = trained(again, "xla")
    assert (once, twice) == (1, 2)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_wrapped_model_is_saved_with_its_metadata(fsdp, tmp_path):
    import torch_xla.core.xla_model as xm

    whole = block()
    inner = fsdp.XlaFullyShardedDataParallel(fsdp.checkpoint_module(block()))
    model = fsdp.XlaFullyShardedDataParallel(nn.Sequential(inner))
    x = torch.randn(5, 4)
    whole(x).square().sum().backward()
    model(x.to("xla").requires_grad_()).square().sum().backward()
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)
    metadata = model.get_shard_metadata()
    assert (metadata["world_size"], metadata["rank"]) == (1, 0)
    saved = {"model": model.state_dict(), "shard_metadata": metadata}
    xm.save(saved, tmp_path / "epoch_1_rank_0.pth", master_only=False)
    state, _ = fsdp.consolidate_sharded_model_checkpoints(
        f"{tmp_path}/epoch_1", "_rank_*.pth", save_model=False
    )
    want = {f"0.{name}": value for name, value in whole.state_dict().items()}
    assert state.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(state[name], value)
    for states in ([model.state_dict()],):
        again = fsdp.consolidate_sharded_state_dicts(states, metadata)
        assert again.keys() == want.keys()
