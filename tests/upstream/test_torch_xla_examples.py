"""pytorch/xla's own examples, untouched, have the losses of eager PyTorch on eight devices.

Waits for a checkout: TPUPORT_UPSTREAM_XLA=/path/to/xla (pytorch/xla at 41398bff).
"""

import os
from pathlib import Path

import numpy as np
import pytest

import tpuport
from tests.upstream.torch_xla_example import STEPS, losses

CHECKOUT = os.environ.get("TPUPORT_UPSTREAM_XLA", "")
EXAMPLES = Path(CHECKOUT) / "examples"
SMALL = (
    *("--hidden-size=32", "--num-attention-heads=4", "--num-key-value-heads=2"),
    *("--intermediate-size=64", f"--num-steps={STEPS}", "--print-metrics"),
)
SCRIPTS = {
    "train_resnet_base.py": (),
    "train_resnet_amp.py": (),
    "train_decoder_only_base.py": SMALL,
    "train_decoder_only_base.py with scan": ("scan.decoder_with_scan.DecoderWithScan", *SMALL),
    "data_parallel/train_resnet_ddp.py": (),
    "data_parallel/train_resnet_xla_ddp.py": (),
    "data_parallel/train_resnet_spmd_data_parallel.py": (),
    "debug/train_resnet_benchmark.py": (),
    "eager/train_decoder_only_eager.py": (),
    "eager/train_decoder_only_eager_multi_process.py": (),
    "eager/train_decoder_only_eager_spmd_data_parallel.py": (),
    "eager/train_decoder_only_eager_with_compile.py": (),
    "flash_attention/train_decoder_only_flash_attention.py": (),
    "flash_attention/train_decoder_only_flash_attention_fsdp_v2.py": (),
    "fsdp/train_decoder_only_fsdp_v2.py": (),
    "fsdp/train_resnet_fsdp_auto_wrap.py": (),
}

pytestmark = [
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="TPUPORT_UPSTREAM_XLA names no checkout"),
    pytest.mark.filterwarnings("ignore:torch_xla. one process runs"),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_has_eager_losses(script):
    name, arguments = script.split()[0], list(SCRIPTS[script])
    found = []
    for port_modules in (False, True):
        with tpuport.porting(paths=[EXAMPLES], port_modules=port_modules) as run:
            found.append(losses(EXAMPLES, name, arguments))
    assert len(found[0]) == STEPS
    np.testing.assert_allclose(found[1], found[0], rtol=1e-2 if "amp" in name else 1e-5)
    assert len(run.report.programs) == 1
    assert run.report.descended == []
