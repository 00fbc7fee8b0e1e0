"""`torch.Generator(device="cuda")` in eager code and as an argument of ported programs."""

import copy
import pickle

import pytest
import torch

import tpuport
from tpuport.foundation.errors import UsageError


@pytest.fixture(autouse=True)
def _porting():
    with tpuport.porting():
        yield


def test_it_says_where_it_was_made_and_is_a_generator():
    there, here = torch.Generator(device="cuda"), torch.Generator()
    assert there.device == torch.device("cuda", 0)
    assert here.device == torch.Generator("cpu").device == torch.device("cpu")
    assert isinstance(there, torch.Generator)
    assert isinstance(here, torch.Generator)
    assert not isinstance(3, torch.Generator)
    with pytest.raises(UsageError, match="cuda:2 was asked for"):
        torch.Generator("cuda:2")


def test_its_numbers_are_those_of_the_cpus_with_the_same_seed():
    there, here = torch.Generator("cuda").manual_seed(7), torch.Generator().manual_seed(7)
    assert there.initial_seed() == 7
    drawn = torch.randn(5, device="cuda", generator=there)
    assert drawn.device == torch.device("cuda", 0)
    assert torch.equal(drawn.cpu(), torch.randn(5, generator=here))
    x = torch.empty(3, device="cuda").normal_(generator=there)
    assert torch.equal(x.cpu(), torch.empty(3).normal_(generator=here))


@pytest.mark.parametrize(
    "twin",
    [
        lambda g: pickle.loads(pickle.dumps(g)),
        copy.deepcopy,
        lambda g: g.clone_state(),
        lambda g: torch.Generator("cuda").set_state(g.get_state()),
    ],
)
def test_a_copy_goes_on_where_it_was(twin):
    first = torch.Generator("cuda").manual_seed(1)
    torch.rand(3, generator=first)
    second = twin(first)
    assert second.device == torch.device("cuda", 0)
    assert torch.equal(torch.rand(4, generator=first), torch.rand(4, generator=second))


class Noise(torch.nn.Module):
    def forward(self, x, generator):
        # As diffusers does: noise is drawn where its generator is.
        where = generator.device.type
        assert where == "cuda"
        assert isinstance(generator, torch.Generator)
        return x + torch.randn(x.shape, generator=generator, device=where)


def test_a_ported_program_draws_from_it():
    ported = tpuport.convert(Noise())
    x = torch.zeros(4)
    draws = [
        tpuport.to_torch(ported(x, torch.Generator("cuda").manual_seed(seed))).cpu()
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_a_ported_program_draws_anew_from_the_same_one():
    ported = tpuport.convert(Noise())
    generator, x = torch.Generator("cuda").manual_seed(1), torch.zeros(4)
    first, second = ported(x, generator), ported(x, generator)
    assert not torch.equal(tpuport.to_torch(first).cpu(), tpuport.to_torch(second).cpu())
