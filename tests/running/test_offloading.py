"""Offloading by groups of blocks: the module stays on the accelerator, with its numbers."""

import diffusers
import torch

import tpuport


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(160, 160)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(160, 160) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_groups_of_blocks_stay_on_the_accelerator():
    """Their hooks would give weights other memory in the middle of the program."""
    torch.manual_seed(0)
    net, x = Blocks().eval().requires_grad_(False), torch.randn(2, 160)
    expected, weights = net(x), {n: p.clone() for n, p in net.named_parameters()}
    how = {"onload_device": torch.device("cuda"), "num_blocks_per_group": 1, "use_stream": True}
    with tpuport.porting():
        diffusers.hooks.apply_group_offloading(net, **how)
        for _ in range(2):
            torch.testing.assert_close(net(x.cuda()).cpu(), expected, rtol=1e-5, atol=1e-5)
        for name, parameter in net.named_parameters():
            assert torch.equal(parameter.cpu(), weights[name])
