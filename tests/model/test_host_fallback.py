"""`fallback="host"`: functions that cannot be traced, as callbacks, judged by eager PyTorch."""

import copy
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import UsageError
from tpuport.training import make_train_step


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().numpy()


def sorted_times(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sort(_numpy(x), axis=-1)) * x


def smallest(x: torch.Tensor) -> float:
    return float(np.min(_numpy(x)))


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x * float(np.min(_numpy(x))) + torch.rand(3)


def numpy_noise(x: torch.Tensor) -> torch.Tensor:
    return x * float(np.min(_numpy(x))) + np.random.rand()


def positive(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(_numpy(x)[_numpy(x) > 0].copy())


def rows(x: torch.Tensor) -> torch.Tensor:
    return x[: 1 + int(np.min(_numpy(x)) > 1e9)]


def itself(x: torch.Tensor) -> torch.Tensor:
    assert np.isfinite(_numpy(x)).all()
    return x


def doubled(x: torch.Tensor) -> None:
    x.mul_(2 + 0 * float(np.min(_numpy(x))))


def limited(x: torch.Tensor) -> torch.Tensor:
    if np.max(_numpy(x)) > 50:
        raise ValueError(f"too large: {tuple(x.shape)}")
    return x * 3


def pair(x: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
    order = np.argsort(_numpy(x), axis=-1)
    return {"order": torch.from_numpy(order), "scaled": [x * scale, (x * x).sum(0)], "name": "pair"}


class Block(nn.Module):
    """State that only the host changes: buffers of its own, and those of a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x))
        self.count += 1
        return y * float(np.max(_numpy(y)))


class Counts(nn.Module):
    """A Python attribute that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += int(np.sum(_numpy(x)) > 0) + 1
        return x


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.kind = nn.Linear(3, 3), kind
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.block = {"block": Block, "counts": Counts}.get(kind, nn.Identity)()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.kind)(self.first(x)).tanh()

    def counts(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)

    def sorted(self, x: torch.Tensor) -> torch.Tensor:
        return sorted_times(x) + sorted_times(x + 1)

    def number(self, x: torch.Tensor) -> torch.Tensor:
        return x * smallest(x)

    def same(self, x: torch.Tensor) -> torch.Tensor:
        y = itself(x)
        assert y is x
        return y

    def written(self, x: torch.Tensor) -> torch.Tensor:
        y = x.detach().clone()
        doubled(y)
        return x * y

    def tree(self, x: torch.Tensor) -> torch.Tensor:
        found = pair(x, self.scale)
        return found["scaled"][0].gather(-1, found["order"]) + found["scaled"][1]

    def ungraded(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = sorted_times(x)
        assert not y.requires_grad
        return x * y

    def raises(self, x: torch.Tensor) -> torch.Tensor:
        return limited(x)

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return noisy(x)

    def numpy_noise(self, x: torch.Tensor) -> torch.Tensor:
        return numpy_noise(x)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return hidden(x)

    def view(self, x: torch.Tensor) -> torch.Tensor:
        return rows(x)


def _batch(seed: int, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) + shift


def hidden(x: torch.Tensor) -> torch.Tensor:
    return x * float(np.min(_numpy(x))) * _GLOBAL[0].scale


_GLOBAL: list[Any] = []
RUN = {
    "block": "Block.forward",
    "sorted": "sorted_times",
    "number": "Net.number",
    "same": "itself",
    "written": "doubled",
    "tree": "pair",
    "ungraded": "sorted_times",
}


@pytest.mark.parametrize("kind", RUN)
def test_values_state_and_gradients_are_those_of_eager(kind: str) -> None:
    torch.manual_seed(0)
    model = Net(kind)
    eager, ported = copy.deepcopy(model), tpuport.convert(model, fallback="host")
    for seed in range(3):
        got = tpuport.to_torch(ported(_batch(seed)))
        torch.testing.assert_close(got, eager(_batch(seed)).detach())
    assert not ported.report.retraces
    for name, buffer in eager.named_buffers():
        got = tpuport.to_torch(ported.buffers[name])
        torch.testing.assert_close(got, buffer, check_dtype=False)
    (part,) = ported.report.host
    assert part.name == RUN[kind]
    assert part.calls >= 3
    assert part.bytes > 0
    assert part.name in str(ported.report)
    # Gradients of a later call, on a batch that nothing was compared on.
    eager(_batch(9)).sum().backward()

    def total(params: Any) -> jax.Array:
        return ported.apply(params, ported.buffers, None, _batch(9))[0].sum()

    for name, grad in jax.jit(jax.grad(total))(ported.params).items():
        want = eager.get_parameter(name).grad
        want = torch.zeros(()) if want is None else want
        torch.testing.assert_close(tpuport.to_torch(grad), want)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("counts", "changes attributes"),
        ("noise", "draws random numbers"),
        ("numpy_noise", "draws random numbers from numpy's"),
        ("view", "returns a view"),
        ("hidden", "reads state of the model"),
    ],
)
def test_what_a_callback_would_lose_is_refused_at_its_line(kind: str, why: str) -> None:
    model = Net(kind)
    _GLOBAL[:] = [model]
    with pytest.raises(tpuport.PortError, match=why) as caught:
        tpuport.convert(model, fallback="host")(_batch(0))
    assert caught.value.file == __file__


def test_nothing_runs_on_the_host_unasked() -> None:
    with pytest.raises(tpuport.PortError, match="TPU301"):
        tpuport.convert(Net("sorted"))(_batch(0))
    with pytest.raises(UsageError, match="fallback is None or 'host'"):
        tpuport.convert(Net("sorted"), fallback="cpu")


def test_the_ported_function_itself_does_not_run_on_the_host() -> None:
    with pytest.raises(tpuport.PortError, match="in the ported method itself"):
        tpuport.convert(sorted_inside, fallback="host")(_batch(0))


def sorted_inside(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sort(x.detach().numpy()))


def keeps(x: torch.Tensor) -> torch.Tensor:
    return positive(x).sum()


def test_a_size_that_depends_on_values_is_refused_when_it_changes() -> None:
    ported = tpuport.convert(keeps, fallback="host")
    x = torch.tensor([1.0, -1.0, 2.0])
    assert float(ported(x)) == 3.0
    assert float(ported(x * 2)) == 6.0
    with pytest.raises(tpuport.PortError, match=r"positive .* returned \(float32\[1\]\)") as caught:
        ported(-x)
    assert caught.value.file == __file__
    assert float(ported(x)) == 3.0


def test_what_the_host_raises_for_values_is_raised() -> None:
    ported = tpuport.convert(Net("raises"), fallback="host")
    ported(_batch(0))
    with pytest.raises(ValueError, match=r"too large: \(4, 3\)"):
        ported(_batch(0, shift=1000.0))
    ported(_batch(1))


class Criterion(nn.Module):
    """A set criterion as DETR has it: a matching by scipy, which no gradient goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.matcher, self.classes, self.boxes = Matcher(), nn.Linear(6, 5), nn.Linear(6, 4)

    def forward(self, hidden: torch.Tensor, targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        logits, boxes = self.classes(hidden), self.boxes(hidden).sigmoid()
        found = self.matcher(logits, boxes, targets)
        batch = torch.cat([torch.full_like(s, i) for i, (s, _) in enumerate(found)])
        source = torch.cat([s for s, _ in found])
        pairs = list(zip(targets, found, strict=True))
        wanted = torch.full(logits.shape[:2], 4)
        wanted[batch, source] = torch.cat([t["labels"][j] for t, (_, j) in pairs])
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), wanted)
        target_boxes = torch.cat([t["boxes"][j] for t, (_, j) in pairs])
        return loss + (boxes[batch, source] - target_boxes).abs().mean()


class Matcher(nn.Module):
    @torch.no_grad()
    def forward(
        self, logits: torch.Tensor, boxes: torch.Tensor, targets: list[dict[str, torch.Tensor]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        from scipy.optimize import linear_sum_assignment

        labels = torch.cat([t["labels"] for t in targets])
        cost = torch.cdist(boxes.flatten(0, 1), torch.cat([t["boxes"] for t in targets]), p=1)
        cost = cost - logits.flatten(0, 1).softmax(-1)[:, labels]
        cost = cost.view(*logits.shape[:2], -1).cpu()
        sizes = [len(t["boxes"]) for t in targets]
        found = [linear_sum_assignment(c[i]) for i, c in enumerate(cost.split(sizes, -1))]
        return [(torch.as_tensor(i), torch.as_tensor(j)) for i, j in found]


def _scene(seed: int) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    g = torch.Generator().manual_seed(seed)
    targets = [
        {"labels": torch.randint(0, 4, (n,), generator=g), "boxes": torch.rand(n, 4, generator=g)}
        for n in (2, 3)
    ]
    return torch.randn(2, 7, 6, generator=g), targets


def _eager_losses(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for seed in range(3):
        loss = model(*_scene(seed))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_through_a_matching_by_scipy_is_that_of_eager() -> None:
    pytest.importorskip("scipy")
    torch.manual_seed(0)
    model = Criterion()
    want = _eager_losses(copy.deepcopy(model))
    with tpuport.porting(fallback="host") as run:
        got = _eager_losses(copy.deepcopy(model).cuda())
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert [part.name for part in run.report.programs[0].host] == ["Matcher.forward"]

    ported = tpuport.convert(model, args=_scene(0), fallback="host")
    step = make_train_step(ported, optimizer=optax.sgd(0.5))
    state, losses = step.init(), []
    for seed in range(3):
        state, metrics = step(state, *_scene(seed))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, want, rtol=1e-5)


def test_compile_for_says_what_the_program_calls_on_the_host() -> None:
    ported = tpuport.convert(Net("sorted"), args=(_batch(0),), fallback="host")
    found = tpuport.compile_for(ported, "v6e-1", inputs=(_batch(0),)).findings
    assert any("sorted_times runs on the host" in finding for finding in found)
