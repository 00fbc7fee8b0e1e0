"""Random stacks of equal blocks, as loops, as functions and unrolled, by convert().

Some equal layers of benchmarks/research_layers.txt in a list are called as research code calls
them: in a loop, with skips, by index, in pairs, with a number of their own, twice, or some of them.
The forms of blocks, stacked weights and rematerialization are chosen at random; results, gradients
and buffers are compared with eager PyTorch in later calls too.
Prints what differs: `python -m benchmarks.block_stacks --count 100`.
"""

import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tpuport
from benchmarks import research_scripts
from benchmarks.seeds import Found, run_seeds, varied
from benchmarks.training_scripts import listed

# What a network does with `self.layers`, a list of equal layers.
_WALKS = listed("""
for layer in self.layers:
    x = layer(x)

for i in range(len(self.layers)):
    x = self.layers[i](x)

for i, layer in enumerate(self.layers):
    x = layer(x) * (1 + 0.1 * i)

for layer, scale in zip(self.layers, self.scales):
    x = x + scale * layer(x)

x = nn.Sequential(*self.layers)(x)

kept = []
for layer in self.layers:
    x = layer(x)
    kept.append(x)
x = sum(kept) / len(kept)

kept = []
for i, layer in enumerate(self.layers):
    if i < len(self.layers) // 2:
        kept.append(x)
    elif kept:
        x = x + kept.pop()
    x = layer(x)

for layer, other in zip(self.layers, self.others):
    x = other(layer(x))

for _ in range(2):
    for layer in self.layers:
        x = layer(x)

for layer in reversed(self.layers):
    x = layer(x)

for layer in self.layers[1:]:
    x = layer(x) + self.layers[0](x) * 0.1

for i, layer in enumerate(self.layers):
    x = layer(x)
    if i == 1:
        self.middle = x.detach()

for i, layer in enumerate(self.layers):
    x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)

for i, layer in enumerate(self.layers):
    x = layer(x) if i % 2 else layer(x.flip(1)).flip(1)

for layer, slope in zip(self.layers, self.slopes.tolist()):
    x = F.leaky_relu(layer(x), slope)

for i, layer in enumerate(self.layers):
    with torch.set_grad_enabled(i > 0 and torch.is_grad_enabled()):
        x = layer(x)

states = [x]
for layer in self.layers:
    states.append(layer(states[-1]) + 0.1 * states[max(0, len(states) - 2)])
x = torch.stack(states).mean(0)

for name, layer in self.named.items():
    x = layer(x)
""")
_CHANGES = listed("""
pass

pass

self.layers[1].requires_grad_(False)

self.layers[-1] = self.layers[0]

self.layers.append(OTHER())

for p in self.layers[1].parameters(): p.data.mul_(0.5)

self.layers[1].eval()
""")
_STATE = re.compile(r"register_buffer|def forward.*self\.\w+(\[.*?\])? \+?= ", re.S)
_FORMS = [{}, {"blocks": "scan"}, {"blocks": "scan"}, {"blocks": "once"}, {"blocks": "unroll"}]


class Maker:
    """Makes one network from a seed, and the form in which it is ported."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def program(self) -> tuple[str, dict[str, Any], bool, str | None]:
        """Return a network's source, options of convert, whether to stack, and a remat policy."""
        head, layers = research_scripts.layers()
        names = [name for name, one in layers.items() if "(nn.Module)" in one]
        layer, other = self._random.choice(names), self._random.choice(names)
        needed = [
            one
            for name, one in layers.items()
            if name in (layer, other) or name not in names
        ]  # fmt: skip
        count, walk = self._random.randint(3, 5), self._random.choice(_WALKS)
        change = self._random.choice(_CHANGES).replace("OTHER", other)
        if "checkpoint" in walk:
            # Eager PyTorch changes state again where it computes a block again.
            change = "pass"
            walk = _WALKS[0] if _STATE.search(layers[layer]) else walk
        made = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([{layer}() for _ in range({count})])
        self.others = nn.ModuleList([nn.LayerNorm(C) for _ in range({count})])
        self.scales = nn.Parameter(torch.linspace(0.5, 1, {count}))
        self.register_buffer("slopes", torch.linspace(0.1, 0.4, {count}))
        self.middle = None
        {change}
        self.named = nn.ModuleDict({{f"n{{i}}": layer for i, layer in enumerate(self.layers)}})

    def forward(self, x):
"""
        made += "".join(f"        {line}\n" for line in walk.splitlines()) + "        return x\n"
        source = "\n\n".join([head.strip(), *needed, made])
        source, _ = varied(source, self._random)
        remat = self._random.choice([None, None, "full", "dots"])
        return source, self._random.choice(_FORMS), self._random.random() < 0.4, remat


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    source, options, stacked, policy = Maker(seed).program()

    def prepare(ported: Any) -> None:
        if policy is not None:
            tpuport.remat(ported, policy)
        if stacked:
            tpuport.stack_blocks(ported)

    shown = f"{source}\n---\n{options}, stacked={stacked}, remat={policy}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Found(*research_scripts.of_convert(source, folder, options, prepare), shown)


if __name__ == "__main__":
    run_seeds(__doc__, _judged)
