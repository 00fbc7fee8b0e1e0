"""Data loaders, pinned memory, default devices and threads inside a porting context."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import tpuport
from tpuport.compat.emulated.settings import active

THERE, HERE = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def _porting():
    with tpuport.porting():
        yield


class Squares(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"x": torch.full((2,), float(index**2)), "index": index}


def test_a_loader_that_pins_makes_no_thread_and_no_warning():
    before = threading.active_count()
    batches = []
    for batch in DataLoader(Squares(), batch_size=2, pin_memory=True):
        assert threading.active_count() == before
        batches.append(batch["x"].to("cuda", non_blocking=True))
    assert all(batch.device == THERE for batch in batches)
    assert torch.cat(batches)[:, 0].tolist() == [0, 1, 4, 9, 16, 25]


# A worker that is spawned imports torch.
@pytest.mark.parametrize(("start", "workers"), [("fork", 2), ("spawn", 1)])
# jax warns at each fork of a process that has its threads; the workers do not call it.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_with_workers_works(start: str, workers: int):
    loader = DataLoader(
        Squares(), batch_size=2, num_workers=workers, pin_memory=True, multiprocessing_context=start
    )
    values = [batch["x"].cuda(non_blocking=True)[:, 0] for batch in loader]
    assert torch.cat(values).tolist() == [0, 1, 4, 9, 16, 25]


def test_pinning_is_a_copy_that_says_so():
    x = torch.ones(2)
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert not x.is_pinned()
    assert pinned.pin_memory() is pinned
    assert torch.empty(2, pin_memory=True).is_pinned()
    pinned.zero_()
    assert x.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch.cuda.FloatTensor'"):
        torch.ones(2, device="cuda").pin_memory()


def test_a_default_device_is_where_tensors_are_made():
    torch.set_default_device("cuda")
    assert torch.get_default_device() == THERE
    assert torch.zeros(2).device == torch.nn.Linear(2, 2).weight.device == THERE
    assert torch.zeros(2, device="cpu").device == HERE
    torch.set_default_device("cpu")
    assert torch.zeros(2).device == HERE
    torch.set_default_device(0)
    assert torch.tensor([1.0]).device == THERE
    torch.set_default_device(None)
    assert torch.get_default_device() == HERE
    with torch.device("cuda"):
        assert torch.zeros(2).device == THERE
    assert torch.zeros(2).device == HERE


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type:UserWarning")
@pytest.mark.parametrize("by_name", [True, False])
def test_a_default_tensor_type_names_both(by_name):
    kind = "torch.cuda.HalfTensor" if by_name else torch.cuda.HalfTensor
    torch.set_default_tensor_type(kind)
    try:
        x = torch.zeros(2)
        assert (x.dtype, x.device) == (torch.float16, THERE)
        made = torch.Tensor(2, 3), torch.Tensor([1.0, 2.0]), torch.Tensor(), torch.Tensor(x.shape)
        assert {(one.dtype, one.device) for one in made} == {(torch.float16, THERE)}
        assert torch.nn.Parameter(torch.Tensor(2)).device == THERE
        assert torch.FloatTensor(2).device == torch.Tensor(2, device="cpu").device == HERE
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")
    x = torch.zeros(2)
    assert (x.dtype, x.device) == (torch.float32, HERE)
    assert torch.Tensor(2, 3).device == HERE
    assert "__new__" not in vars(torch.Tensor)
    # A default device alone does not move what this constructor makes, as in torch.
    torch.set_default_device("cuda")
    assert torch.Tensor(2, 3).device == HERE
    torch.set_default_device(None)


def test_dynamo_can_be_imported_under_a_default_tensor_type():
    """Optimizers import it, and it compares the constructor of tensors with its own."""
    code = (
        "import torch, tpuport\n"
        "with tpuport.porting():\n"
        "    torch.set_default_tensor_type(torch.cuda.FloatTensor)\n"
        "    import torch._dynamo\n"
        "    assert torch.Tensor(2).is_cuda\n"
        "assert '__new__' not in vars(torch.Tensor)\n"
        "assert not torch.Tensor(2).is_cuda\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)


def there() -> tuple[torch.device, object]:
    return torch.ones(2, device="cuda").device, active()


def test_a_thread_is_in_the_context_that_starts_it():
    seen = []

    class Own(threading.Thread):
        def run(self):
            seen.append(there())

    with tpuport.porting(absent=("inner",)) as settings:
        threads = [threading.Thread(target=lambda: seen.append(there())), Own()]
        for thread in threads:
            thread.start()
            thread.join()
            assert "run" not in vars(thread)
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(there).result())
    assert seen == [(THERE, settings)] * 3


def test_an_error_in_a_thread_reaches_its_hook(monkeypatch):
    caught = []
    monkeypatch.setattr(threading, "excepthook", lambda given: caught.append(given.exc_value))
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    assert isinstance(caught[0], ZeroDivisionError)
