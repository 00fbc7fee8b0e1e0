"""A policy of openpi's own class, in a Python with the transformers that it wants.

`python openpi_policy.py CHECKOUT FOLDER`: reads model.safetensors and batch.pt of the folder, and
writes found.pt with what eager PyTorch and the port of the untouched class compute.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model

import tpuport
from recipes.openpi.config import read_config
from recipes.openpi.upstream import (
    make_upstream,
    observation_of,
    upstream_actions,
    upstream_loss,
    upstream_policies,
)


def main(checkout: str, folder: Path) -> None:
    config, batch = read_config(folder / "config.json"), torch.load(folder / "batch.pt")
    found: dict[str, Any] = {}
    with upstream_policies(checkout, config) as policies:
        policy = make_upstream(policies, config)
        load_model(policy, str(folder / "model.safetensors"))  # refuses missing and further names
        loss = upstream_loss(policy, batch)
        loss.backward()
        found["loss"] = loss.detach()
        found["grads"] = {name: value.grad for name, value in policy.named_parameters()}
        within: Any = policy.paligemma_with_expert
        images = [
            within.embed_image(image).detach() for image in observation_of(batch).images.values()
        ]
        found["images"] = torch.cat(images, dim=1)
        found["actions"] = upstream_actions(policy, batch, batch["noise"])
        ported = tpuport.convert(policy, methods=(upstream_loss, upstream_actions), verify=False)
        found["ported_loss"] = tpuport.to_torch(ported.upstream_loss(batch)).detach()
        actions = ported.upstream_actions(batch, batch["noise"])
        found["ported_actions"] = tpuport.to_torch(actions)
    torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
