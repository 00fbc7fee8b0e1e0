"""Random training steps on meshes of eight virtual CPU devices, beside the same on one device.

Modules and rules are those of `sharded_modules`; optimizers, schedules and options those of
`train_steps`. After three steps the state is saved, and restored for two more on another mesh.
Losses, parameters, buffers and averages are compared with five steps on one device.
Prints what differs: `python -m benchmarks.sharded_training --count 100`.
"""

import copy
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

import tpuport
from benchmarks.seeds import Found, run_seeds
from benchmarks.sharded_modules import AXES, SIZES, Net, rules_of
from benchmarks.train_steps import OPTIMIZERS, SCHEDULES
from tpuport.foundation.errors import PortError, UsageError
from tpuport.sharding import make_mesh
from tpuport.training import Checkpoints, from_torch, make_train_step

_STEPS, _BEFORE = 5, 3
_TOLERANCE = 2e-3


def _loss(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    scores, mean = model(batch["ids"], batch["scale"])
    found = torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch["ids"].flatten())
    return found + (mean.square() * batch["scale"]).mean()


class _Training:
    """A module on a mesh, or without one, and the step that trains it."""

    def __init__(self, net: Net, texts: tuple[str, str], options: dict[str, Any], on: Any) -> None:
        module = copy.deepcopy(net)
        self.ported = tpuport.convert(module, verify=False)
        if on is not None:
            mesh, rules = on
            tpuport.shard(self.ported, make_mesh(mesh), rules)
        names: dict[str, Any] = {"torch": torch, "schedules": torch.optim.lr_scheduler}
        names["groups"] = [p for p in module.parameters() if p.requires_grad]
        optimizer = names["optimizer"] = eval(texts[0], names)
        schedule = eval(texts[1], names)
        made = from_torch(self.ported, optimizer, schedule, steps=8)
        self.step = make_train_step(self.ported, _loss, made, **options)

    def trained(self, state: Any, data: list[Any], seen: dict[str, Any], first: int) -> Any:
        """Take steps, and note their losses."""
        for number, batch in enumerate(data):
            state, metrics = self.step(state, batch)
            for name in ("loss", "grad_norm"):
                if name in metrics:
                    seen[f"{name} of step {first + number}"] = np.asarray(metrics[name])
        return state

    def values(self, state: Any, *, ema: bool) -> dict[str, Any]:
        """Return parameters, buffers and averages."""
        trained = self.step.load_state(state).to_torch().state_dict()
        seen = {name: value.detach().numpy() for name, value in trained.items()}
        if ema:
            averages = self.step.load_state(state, ema=True).to_torch().named_parameters()
            seen |= {f"average of {name}": value.detach().numpy() for name, value in averages}
        return seen


def _difference(want: dict[str, Any], have: dict[str, Any]) -> str:
    for name, expected in want.items():
        expected, found = np.asarray(expected, np.float64), np.asarray(have[name], np.float64)
        apart = abs(found - expected).max() / (abs(expected).max() + 1e-3)
        if not apart <= _TOLERANCE:
            return f"{name} by {apart:.2g}"
    return ""


def _data(net: Net, chosen: random.Random) -> list[dict[str, torch.Tensor]]:
    batch, length = chosen.choice((8, 4, 6)), chosen.choice((8, 16, 5))
    return [
        {
            "ids": torch.randint(0, net.tokens, (batch, length)),
            "scale": torch.rand(batch) + 0.5,
        }
        for _ in range(_STEPS)
    ]


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    net = Net(chosen).train(chosen.random() < 0.7)
    for layer in net.layers:
        if chosen.random() < 0.15:
            layer.requires_grad_(False)
    data = _data(net, chosen)
    texts = chosen.choice(OPTIMIZERS), chosen.choice(SCHEDULES)
    options = {
        "accumulate": chosen.choice([1, 1, 2]),
        "clip_norm": chosen.choice([None, 0.3]),
        "ema_decay": chosen.choice([None, 0.9]),
    }
    places = []
    for _ in range(2):
        sizes = chosen.choice(SIZES)
        mesh: dict[str, int] = dict(zip(chosen.sample(AXES, len(sizes)), sizes, strict=True))
        places.append((mesh, rules_of(net, chosen, list(mesh))))
    shown = f"{net}\n{texts}\n{options}\n{data[0]['ids'].shape}, {places}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield Found(*_verdict(net, texts, options, places, data, folder / str(seed)), shown)
        except (PortError, UsageError) as error:
            yield Found("refused", str(error).partition("\n")[0], shown)
        except jax.errors.JaxRuntimeError as error:
            yield Found("differs", f"raises {str(error)[:300]}", shown)
    jax.clear_caches()


def _verdict(
    net: Net, texts: Any, options: Any, places: Any, data: Any, folder: Path
) -> tuple[str, str]:
    is_averaged = options["ema_decay"] is not None
    alone = _Training(net, texts, options, None)
    wanted: dict[str, Any] = {}
    state = alone.trained(alone.step.init(), data, wanted, 0)
    wanted |= alone.values(state, ema=is_averaged)

    found: dict[str, Any] = {}
    first = _Training(net, texts, options, places[0])
    state = first.trained(first.step.init(), data[:_BEFORE], found, 0)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(state)
    second = _Training(net, texts, options, places[1])
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(second.step.init())
    assert restored is not None
    state = second.trained(restored.state, data[_BEFORE:], found, _BEFORE)
    found |= second.values(state, ema=is_averaged)
    what = _difference(wanted, found)
    return ("differs" if what else "passes"), what


if __name__ == "__main__":
    # XLA reads it when the first array is made.
    flag = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    run_seeds(__doc__, _judged)
