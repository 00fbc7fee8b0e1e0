"""Names of the VAE's weights in upstream's class, AutoencoderKLConv3D, and in diffusers'.

The weights themselves are the same. Source: the attributes of both classes.
"""

import re

# Diffusers' -> upstream's; each is tried in turn.
_NAMES = [
    (r"mid_block\.resnets\.0\.", "mid.block_1."),
    (r"mid_block\.resnets\.1\.", "mid.block_2."),
    (r"mid_block\.attentions\.0\.(?:to_)?", "mid.attn_1."),
    (r"(down|up)_blocks\.(\d+)\.resnets\.", r"\1.\2.block."),
    (r"(down|up)_blocks\.(\d+)\.(down|up)samplers\.0\.", r"\1.\2.\3sample."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
]


def upstream_name(name: str) -> str:
    """What upstream's class calls a weight of diffusers' class."""
    for pattern, other in _NAMES:
        name = re.sub(pattern, other, name)
    return name
