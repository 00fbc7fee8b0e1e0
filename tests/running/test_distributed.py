"""`torch.distributed` of one process against the real one with gloo, function by function."""

import os
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tpuport
from tpuport.foundation.errors import PortError


def x() -> torch.Tensor:
    return torch.arange(6.0).view(2, 3)


def z(*shape: int) -> torch.Tensor:
    return torch.full(shape or (2, 3), 7.0)


def with_object(call: Any, item: Any) -> Any:
    call(item)
    return item


def into(target: Any, call: Any) -> Any:
    result = call(target)
    assert result is None
    return target


# Each gives what changed; run with gloo, with ours, and with ours in a program.
COLLECTIVES = {
    "all_reduce": lambda: into(x(), dist.all_reduce),
    "all_reduce_max": lambda: into(x(), lambda t: dist.all_reduce(t, dist.ReduceOp.MAX)),
    "all_reduce_group": lambda: into(x(), lambda t: dist.all_reduce(t, group=dist.group.WORLD)),
    "reduce": lambda: into(x(), lambda t: dist.reduce(t, 0)),
    "broadcast": lambda: into(x(), lambda t: dist.broadcast(t, src=0)),
    "all_gather": lambda: into([z()], lambda t: dist.all_gather(t, x())),
    "all_gather_into_tensor": lambda: into(z(), lambda t: dist.all_gather_into_tensor(t, x())),
    "gather": lambda: into([z()], lambda t: dist.gather(x(), t, dst=0)),
    "scatter": lambda: into(z(), lambda t: dist.scatter(t, [x()], src=0)),
    "reduce_scatter": lambda: into(z(), lambda t: dist.reduce_scatter(t, [x()])),
    "reduce_scatter_tensor": lambda: into(z(), lambda t: dist.reduce_scatter_tensor(t, x())),
    "all_to_all_single": lambda: into(z(), lambda t: dist.all_to_all_single(t, x())),
    "all_to_all_splits": lambda: into(z(), lambda t: dist.all_to_all_single(t, x(), [2], [2])),
    "ranks": lambda: (dist.get_rank(), dist.get_world_size(), dist.is_initialized()),
    "group_ranks": lambda: dist.get_process_group_ranks(dist.group.WORLD),
    "new_group": lambda: dist.get_process_group_ranks(dist.new_group([0])),
    "new_subgroups": lambda: dist.new_subgroups(1)[0].size(),
    "global_rank": lambda: dist.get_global_rank(dist.group.WORLD, 0),
    "mesh": lambda: (lambda m: (m.size(), m.ndim, m.shape, m.mesh_dim_names))(mesh("cpu")),
    "sub_mesh": lambda: (mesh("cpu")["sp"].get_local_rank(), mesh("cpu")["sp"].get_group().size()),
    "coordinate": lambda: list(mesh("cpu").get_coordinate() or ()),
    "flattened": lambda: mesh("cpu")["dp", "sp"]._flatten("all").size(),
}
OBJECTS = {
    "all_gather_object": lambda: into([None], lambda o: dist.all_gather_object(o, {"a": [1]})),
    "broadcast_object_list": lambda: into([{"a": 1}, 2], lambda o: dist.broadcast_object_list(o)),
    "gather_object": lambda: into([None], lambda o: dist.gather_object({"a": 1}, o, dst=0)),
    "scatter_object_list": lambda: into([None], lambda o: dist.scatter_object_list(o, [{"a": 1}])),
    "monitored_barrier": lambda: dist.monitored_barrier(),
}


def mesh(device: str) -> DeviceMesh:
    return init_device_mesh(device, (1, 1), mesh_dim_names=("dp", "sp"))


@pytest.fixture(scope="module")
def gloo() -> dict[str, Any]:
    """What the real functions give, with the collectives of gloo."""
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            # torch 2.13 has new names for all_gather_into_tensor and reduce_scatter_tensor.
            warnings.simplefilter("ignore", FutureWarning)
            return {name: call() for name, call in {**COLLECTIVES, **OBJECTS}.items()}
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@pytest.fixture
def single(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with tpuport.porting(port_modules=False):
        dist.init_process_group("nccl")
        yield
    assert not dist.is_initialized()


def equal(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(tpuport.to_torch(ours), theirs)
    elif isinstance(theirs, list) and theirs and isinstance(theirs[0], torch.Tensor):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            equal(a, b)
    else:
        assert ours == theirs


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("name", [*COLLECTIVES, *OBJECTS])
def test_it_gives_what_gloo_gives(gloo, name):
    equal({**COLLECTIVES, **OBJECTS}[name](), gloo[name])


class Call(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


PROGRAMS = {
    "all_reduce": lambda t: (dist.all_reduce(t), t)[1],
    "all_gather": lambda t: into([torch.zeros_like(t)], lambda o: dist.all_gather(o, t))[0],
    "into": lambda t: into(torch.zeros_like(t), lambda o: dist.all_gather_into_tensor(o, t)),
    "all_to_all": lambda t: into(torch.zeros_like(t), lambda o: dist.all_to_all_single(o, t)),
    "gather": lambda t: into([torch.zeros_like(t)], lambda o: dist.gather(t, o))[0],
    "scatter": lambda t: into(torch.zeros_like(t), lambda o: dist.scatter(o, [t * 2])),
    "object": lambda t: t * into([0], lambda o: dist.all_gather_object(o, t.shape[1]))[0],
}


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("name", PROGRAMS)
def test_inside_a_program(name):
    function = PROGRAMS[name]
    ported = tpuport.convert(Call(lambda t: function(t * 3) + 1))
    equal(ported(x()), function(x() * 3) + 1)


@pytest.mark.usefixtures("single")
def test_results_of_collectives_carry_no_gradient():
    source = x().requires_grad_()
    gathered = [z()]
    dist.all_gather(gathered, source)
    assert not gathered[0].requires_grad
    assert torch.equal(gathered[0], source)


@pytest.mark.usefixtures("single")
def test_a_result_may_have_a_dim_of_ranks_as_nccl_allows():
    assert torch.equal(into(z(1, 2, 3), lambda t: dist.all_gather_into_tensor(t, x()))[0], x())


@pytest.mark.usefixtures("single")
def test_a_barrier_is_passed_at_once():
    # The real one asks for an accelerator's hooks, which torchax does not register.
    assert dist.barrier() is None
    assert dist.barrier(async_op=True, device_ids=[0]).wait()


@pytest.mark.usefixtures("single")
def test_asynchronous_work_is_done():
    target = z()
    work = dist.all_gather_into_tensor(target, x(), async_op=True)
    assert isinstance(work, dist.Work)
    assert work.is_completed()
    assert work.wait()
    assert torch.equal(target, x())
    assert work.get_future().wait()[0] is target
    average = x()
    dist.all_reduce(average, op=dist.ReduceOp.AVG, async_op=True).wait()
    assert torch.equal(average, x())


@pytest.mark.usefixtures("single")
def test_the_backend_that_was_asked_for():
    assert dist.get_backend() == "nccl"
    assert dist.is_nccl_available()
    group = dist.new_group([0], backend="gloo")
    assert dist.get_backend(group) == "gloo"
    cuda = mesh("cuda")
    assert (cuda.device_type, cuda["dp"].size(), cuda.mesh.tolist()) == ("cuda", 1, [[0]])
    assert dist.get_rank(cuda["sp"].get_group()) == 0


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dist.send(x(), 0), "send needs another process"),
        (lambda: dist.recv(x()), "recv needs another process"),
        (lambda: dist.broadcast(x(), 1), "broadcast names rank 1 of a group of one"),
        (lambda: dist.all_gather([z(), z()], x()), "tensor_list has 2 elements, expected 1"),
        (lambda: dist.gather(x()), "gather_list has none elements"),
        (lambda: dist.all_gather_into_tensor(z(4, 3), x()), r"\(4, 3\) .* cannot take \(2, 3\)"),
    ],
)
def test_what_needs_others_is_refused(call, message):
    with pytest.raises(PortError, match=message):
        call()


def test_a_mesh_starts_the_group_by_itself(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with tpuport.porting():
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="has not been initialized"):
            dist.all_reduce(x())
        assert mesh("cuda").size() == 1
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_more_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    environment, hook = dict(os.environ), sys.excepthook
    with tpuport.porting():
        with pytest.raises(PortError, match="asks for 8 processes") as caught:
            dist.init_process_group("nccl")
        assert "start one process per host" in str(caught.value)
        with pytest.raises(PortError, match="asks for 2 processes"):
            dist.init_process_group("nccl", world_size=2, rank=0)
        with pytest.raises(PortError, match="asks for 8 processes"):
            mesh("cuda")
    assert (dict(os.environ), sys.excepthook) == (environment, hook)


def test_a_group_can_be_left_and_made_again(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with tpuport.porting(), tpuport.porting():
        for backend in ("nccl", "gloo", None):
            dist.init_process_group(backend, init_method="env://")
            assert dist.get_backend() == (backend or "nccl")
            dist.destroy_process_group()
            assert not dist.is_initialized()


def test_functions_kept_from_the_block_are_pytorchs_own_afterwards(gloo):
    del gloo
    with tpuport.porting():
        from torch.distributed import all_gather_into_tensor, init_process_group
    hook = sys.excepthook
    init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        target = z()
        with pytest.warns(FutureWarning, match="all_gather_single"):
            all_gather_into_tensor(target, x())
        assert dist.get_backend() == "gloo"
        assert torch.equal(target, x())
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@pytest.mark.usefixtures("single")
def test_samplers_and_elastic_launchers():
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.utils.data import DistributedSampler

    assert list(DistributedSampler(range(4), shuffle=False)) == [0, 1, 2, 3]
    assert record(lambda: 3)() == 3


@pytest.mark.usefixtures("single")
def test_a_collective_of_a_group_object_is_refused():
    group = dist.group.WORLD
    with pytest.raises(PortError, match=r"allreduce\(\) is called on the process group itself"):
        group.allreduce([torch.ones(2)]).wait()
    with pytest.raises(PortError, match="_allgather_base"):
        group._allgather_base(torch.zeros(2), torch.ones(2))
