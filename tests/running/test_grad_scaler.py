"""`torch.amp.GradScaler("cuda")` scales, unscales, skips and grows on the emulated device."""

import pytest
import torch

import tpuport


@pytest.fixture(autouse=True)
def _porting():
    with tpuport.porting():
        yield


def steps(device: str, scaler, infinite_at: int | None = 1):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        x = torch.ones(2, 3, device=device) * (step + 1)
        loss = model(x).square().mean() * (float("inf") if step == infinite_at else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), [p.detach().cpu().clone() for p in model.parameters()]))
    return seen


def test_it_does_what_the_cpus_scaler_does():
    options = {"init_scale": 1024.0, "growth_interval": 2}
    there = steps("cuda", torch.amp.GradScaler("cuda", **options))
    here = steps("cpu", torch.amp.GradScaler("cpu", **options))
    assert [scale for scale, _ in there] == [scale for scale, _ in here] == [1024, 512, 512, 1024]
    for (_, ours), (_, theirs) in zip(there, here, strict=True):
        for mine, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, expected)


def test_an_infinite_gradient_skips_the_step():
    (_, first), (_, second), (_, third), _ = steps("cuda", torch.amp.GradScaler("cuda"))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(second, third, strict=True))


def test_its_state_goes_through_a_checkpoint():
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    steps("cuda", scaler)
    assert scaler.is_enabled()
    other = torch.amp.GradScaler("cuda")
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == scaler.get_scale() == 4.0
    assert scaler.scale(torch.ones(1, device="cuda")).device == torch.device("cuda", 0)


def test_the_old_name_works():
    with pytest.warns(FutureWarning):
        scaler = torch.cuda.amp.GradScaler(init_scale=4.0)
    assert scaler.is_enabled()
    assert steps("cuda", scaler, infinite_at=None)[-1][0] == 4.0
