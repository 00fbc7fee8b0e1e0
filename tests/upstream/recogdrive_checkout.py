"""Where the tests find an untouched checkout of ReCogDrive, and what they wait for."""

import importlib.util
import os

import pytest

CHECKOUT = os.environ.get("TPUPORT_UPSTREAM_RECOGDRIVE", "")
MODEL = ("timm", "peft")
PLANNER = (*MODEL, "omegaconf", "einops", "diffusers", "transformers")
needs_checkout = pytest.mark.skipif(
    not CHECKOUT, reason="waits for TPUPORT_UPSTREAM_RECOGDRIVE, a checkout of zorrofox/recogdrive"
)
# What upstream itself is warned of.
old_timm = pytest.mark.filterwarnings("ignore:Importing from timm.models.layers:FutureWarning")
old_checkpoint = [
    pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]


def needs(packages: tuple[str, ...]) -> pytest.MarkDecorator:
    """A mark that skips where one of these is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"waits for {', '.join(missing)}")
