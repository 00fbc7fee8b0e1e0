"""`device_map` and CPU offload of transformers and diffusers, with one accelerator."""

import importlib.util

import pytest
import torch

import tpuport
from tpuport.compat.shims.device_map import device_of

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is not None,
    reason="waits for a host without accelerate, which answers these calls itself",
)


@pytest.mark.parametrize(
    ("device_map", "device"),
    [
        (None, None),
        ("auto", "cuda"),
        ("cuda:0", "cuda:0"),
        ({"": 0}, "cuda:0"),
        ({"a": "cuda", "b": "cpu"}, None),
        (0, "cuda:0"),
    ],
)
def test_the_only_device_of_a_map(device_map, device):
    assert device_of(device_map) == device


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    folder = tmp_path_factory.mktemp("llama")
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder, model.state_dict()


@pytest.mark.parametrize("device_map", ["cuda", "auto", {"": 0}])
def test_transformers(saved, device_map):
    folder, state = saved
    with tpuport.porting(port_modules=False):
        model = transformers.LlamaForCausalLM.from_pretrained(
            folder, device_map=device_map, dtype=torch.bfloat16
        )
        assert model.device.type == "cuda"
        for name, value in model.state_dict().items():
            assert value.dtype == torch.bfloat16
            assert torch.equal(value.cpu(), state[name].bfloat16())


def test_without_a_map_it_stays_on_the_cpu(saved):
    with tpuport.porting(port_modules=False):
        model = transformers.LlamaForCausalLM.from_pretrained(saved[0])
        assert model.device.type == "cpu"
        with pytest.raises(ValueError, match="requires `accelerate`"):
            transformers.LlamaForCausalLM.from_pretrained(
                saved[0], device_map={"model": "cuda", "lm_head": "cpu"}
            )
    with pytest.raises(ValueError, match="requires `accelerate`"):
        transformers.LlamaForCausalLM.from_pretrained(saved[0], device_map="cuda")


@pytest.fixture(scope="module")
def unet(tmp_path_factory):
    model = diffusers.UNet2DModel(
        sample_size=4,
        block_out_channels=(8,),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    folder = tmp_path_factory.mktemp("pipeline")
    diffusers.DDPMPipeline(model, diffusers.DDPMScheduler()).save_pretrained(folder)
    return folder


def test_diffusers(unet):
    with tpuport.porting(port_modules=False):
        model = diffusers.UNet2DModel.from_pretrained(unet / "unet", device_map="cuda")
        assert model.device.type == "cuda"
        pipeline = diffusers.DDPMPipeline.from_pretrained(unet, device_map="balanced")
        assert pipeline.device.type == "cuda"
        other = diffusers.DDPMPipeline.from_pretrained(unet)
        assert other.device.type == "cpu"
        other.enable_model_cpu_offload()
        assert other.device.type == "cuda"
