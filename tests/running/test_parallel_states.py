"""Parallel state as models ask for it: HunyuanVideo's own way, Megatron's and xDiT's."""

import importlib.util
import sys

import pytest
import torch

import tpuport
from tpuport.foundation.errors import PortError, UsageError


@pytest.fixture
def block(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with tpuport.porting(port_modules=False):
        yield


@pytest.mark.usefixtures("block")
def test_megatron():
    from megatron.core import mpu, parallel_state
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    assert parallel_state.get_tensor_model_parallel_world_size() == 1
    assert parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    assert get_tensor_model_parallel_group() is None
    assert mpu.model_parallel_is_initialized()
    assert parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    assert mpu.initialize_model_parallel(1, pipeline_model_parallel_size=1) is None
    with pytest.raises(UsageError, match=r"tensor_model_parallel_size=2\) asks for more than one"):
        mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    with pytest.raises(UsageError, match="megatron: get_all_ranks is not provided"):
        parallel_state.get_all_ranks()


def test_megatron_with_other_sizes():
    with tpuport.porting(megatron={"sizes": {"tensor_model_parallel": 4}}):
        from megatron.core import mpu

        assert mpu.get_tensor_model_parallel_world_size() == 4
        assert mpu.get_tensor_model_parallel_rank() == 0
        assert mpu.initialize_model_parallel(tensor_model_parallel_size=4) is None
    with (
        tpuport.porting(megatron={"sizes": {"tensor": 4}}),
        pytest.raises(UsageError, match="no size is called 'tensor'"),
    ):
        import megatron.core.mpu  # noqa: F401


@pytest.mark.usefixtures("block")
def test_xfuser():
    from xfuser.core.distributed import (
        get_sequence_parallel_rank,
        get_sequence_parallel_world_size,
        get_sp_group,
        is_pipeline_last_stage,
    )

    assert (get_sequence_parallel_world_size(), get_sequence_parallel_rank()) == (1, 0)
    assert is_pipeline_last_stage()
    x = torch.randn(2, 3)
    assert get_sp_group().all_gather(x, dim=1) is x
    assert get_sp_group().all_gather(x, separate_tensors=True)[0] is x
    assert get_sp_group().world_size == 1
    assert get_sp_group().device_group is None
    with pytest.raises(UsageError, match=r"xfuser\.get_sp_group\(\)\.send is not provided"):
        get_sp_group().send(x)


class Sharded(torch.nn.Module):
    """As diffusion transformers spread a sequence, whatever the number of processes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from xfuser.core.distributed import (
            get_sequence_parallel_rank,
            get_sequence_parallel_world_size,
            get_sp_group,
        )

        part = torch.chunk(x, get_sequence_parallel_world_size(), 1)[get_sequence_parallel_rank()]
        return get_sp_group().all_gather(part * 2, dim=1) + 1


@pytest.mark.usefixtures("block")
def test_xfuser_in_a_program():
    x = torch.randn(2, 4)
    assert torch.equal(tpuport.to_torch(tpuport.convert(Sharded())(x)), x * 2 + 1)


@pytest.mark.usefixtures("block")
def test_what_is_not_provided_of_them_stands_in():
    from xfuser.core.long_ctx_attention import xFuserLongContextAttention

    with pytest.raises(PortError, match="xFuserLongContextAttention was called"):
        xFuserLongContextAttention()


@pytest.mark.usefixtures("block")
def test_code_that_can_do_without_them_does():
    assert importlib.util.find_spec("megatron") is None
    try:
        import xfuser  # noqa: F401
    except ImportError:
        found = False
    else:
        found = True
    assert not found


# As HunyuanVideo-1.5 does: its state is built at the first question, on a mesh of "cuda".
PARALLEL_STATES = """
import os
from dataclasses import dataclass
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

@dataclass
class State:
    sp: int = 1
    def __post_init__(self):
        world = dist.get_world_size() if dist.is_initialized() else int(os.getenv("WORLD_SIZE", 1))
        sizes = [world // self.sp, self.sp]
        self.mesh = init_device_mesh("cuda", sizes, mesh_dim_names=["dp", "sp"])
        self.sp_enabled = self.sp > 1
        self.sp_group = self.mesh["sp"].get_group() if self.sp_enabled else None
        self.sp_rank = self.mesh["sp"].get_local_rank() if self.sp_enabled else dist.get_rank()

STATE = None
def get_parallel_state():
    global STATE
    STATE = STATE or State()
    return STATE
"""


@pytest.mark.usefixtures("block")
def test_a_mesh_built_when_first_asked_inside_a_program(tmp_path, monkeypatch):
    (tmp_path / "hy_states.py").write_text(PARALLEL_STATES)
    monkeypatch.syspath_prepend(tmp_path)
    import hy_states

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = hy_states.get_parallel_state()
            if state.sp_enabled:
                raise AssertionError("more than one process")
            return x * (2 + state.sp_rank)

    x = torch.randn(3)
    assert torch.equal(tpuport.to_torch(tpuport.convert(Block())(x)), x * 2)
    assert hy_states.STATE.mesh.size() == 1
    del sys.modules["hy_states"]
