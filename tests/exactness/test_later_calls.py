"""An ordinary first call, then a hostile one: results, errors and gradients are eager's.

Contents:
    CALLS           functions with two sets of arguments; what raises for the second raises here
    test_results_*  requires_grad and strides of results do not depend on which call it is
    test_text_*     text of a traced value is refused with its line
    test_writes_*   whether an argument may be written depends on what it is
"""

import copy
import types
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError, UsageError


def leaf(x):
    x[0] = 5.0
    return x * 2


def one_of_several_views(x):
    first, _ = (x * 1).unbind(0)
    first.mul_(2)
    return x


def one_chunk(x):
    first, _ = (x * 1).chunk(2)
    first.mul_(2)
    return x


def view_without_grad(x):
    y = x * 1
    with torch.no_grad():
        view = y[:1]
    view.mul_(2)
    return y


def out(x):
    y = torch.zeros(2)
    torch.add(x, 1, out=y)
    return y


def of(*values: Any, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, requires_grad=grad)


PLAIN, GRAD = of(1.0, 2.0), of(1.0, 2.0, grad=True)
CUBE, THREE = torch.arange(27.0).reshape(3, 3, 3), of(True, False, True)
FAR = of(1e10, -1e10, float("nan"), 300.0, -300.0, 1.5)
CALLS: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "a leaf": (leaf, (PLAIN,), (GRAD,)),
    "one of several views": (one_of_several_views, (PLAIN,), (GRAD,)),
    "one chunk": (one_chunk, (PLAIN,), (GRAD,)),
    "a view made without grad": (view_without_grad, (PLAIN,), (GRAD,)),
    "out": (out, (PLAIN,), (GRAD,)),
    "a mask of another size": (lambda x, m: x[m], (CUBE, THREE), (CUBE, THREE[:2])),
    "softmax of integers": (lambda x: x.softmax(0), (PLAIN,), (of(1, 2),)),
    "an order of complex numbers": (lambda x: x > 0, (PLAIN,), (of(1j, 2.0),)),
    "a maximum of nothing": (lambda x: x.max(), (PLAIN,), (PLAIN[:0],)),
    "einsum": (
        lambda a, b: torch.einsum("ij,jk->ik", a, b),
        (torch.ones(2, 3), torch.ones(3, 2)),
        (torch.ones(2, 3), torch.ones(2, 3)),
    ),
    "casts": (
        lambda x: [x.to(d) for d in (torch.int32, torch.uint8, torch.int8, torch.int16)],
        (FAR.clamp(-9, 9).nan_to_num(),),
        (FAR,),
    ),
}


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.detach().clone().requires_grad_(a.requires_grad) for a in args)


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_of_another_kind_is_eagers(name):
    function, *calls = CALLS[name]
    ported = tpuport.convert(function, verify=False)
    for args in calls:
        try:
            expected = function(*copied(args))
        except Exception as error:
            with pytest.raises(type(error)):
                ported(*copied(args))
            continue
        torch.testing.assert_close(tpuport.to_torch(ported(*copied(args))), expected)


def test_writes_to_an_argument_that_was_computed_are_allowed():
    def function(x):
        x.add_(1)
        return x * 2

    ported = tpuport.convert(function, verify=False)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        ported(GRAD.detach().requires_grad_())
    computed = GRAD * 1
    torch.testing.assert_close(tpuport.to_torch(ported(computed)), of(4.0, 6.0))


def test_results_of_all_calls_require_grad_and_have_eagers_strides():
    class Net(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y.t() * 2

    model = Net(2, 3)
    ported, x = tpuport.convert(model, verify=False), torch.ones(4, 2)
    expected = model(x)
    for _ in range(3):
        for have, want in zip(ported(x), expected, strict=True):
            assert have.requires_grad
            assert have.stride() == want.stride()


def test_text_of_a_traced_value_is_refused_with_its_line():
    def function(x):
        shown = f"mean {x.mean()}"
        return x, shown

    with pytest.raises(PortError, match="the result holds the text") as caught:
        tpuport.convert(function, verify=False)(PLAIN)
    assert caught.value.source_line == 'shown = f"mean {x.mean()}"'


def test_a_lazy_module_has_to_be_called_before():
    with pytest.raises(UsageError, match="weight has no values yet"):
        tpuport.convert(torch.nn.LazyLinear(3))


def test_a_forward_and_a_class_that_are_set_later_count_in_a_script():
    with tpuport.porting():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()).cuda()
        x = torch.ones(1, 2).cuda()
        model(x)
        model[0].forward = lambda x: x * 7
        assert model(x).tolist() == [[7.0, 7.0]]
        del model[0].forward
        model[0].__class__ = torch.nn.Identity
        assert model(x).tolist() == [[1.0, 1.0]]


def test_all_values_written_to_one_place_have_its_gradient():
    def function(x, s):
        y = x.clone()
        y[torch.tensor([1, 1])] = s
        return F.relu(y) * torch.tensor([1.0, 5.0])

    import jax

    ported = tpuport.convert(function, verify=False)
    total = lambda s: ported.apply({}, {}, None, PLAIN, s)[0].sum()  # noqa: E731
    assert jax.jit(jax.grad(total))(jax.numpy.ones(2)).tolist() == [5.0, 5.0]


def test_an_error_of_jax_in_a_branch_is_no_check_of_the_users():
    import jax.numpy as jnp

    def function(x):
        if x.sum() > 0:
            jnp.zeros(2) + jnp.zeros(3)
        return x

    with pytest.raises(PortError, match="an outcome of the branch cannot be traced") as caught:
        tpuport.convert(function, verify=False)(PLAIN)
    assert caught.value.source_line == "jnp.zeros(2) + jnp.zeros(3)"


def test_edits_of_tensors_that_are_no_state_count():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shifts = torch.ones(2), [torch.zeros(2)]
            self.layers = [torch.nn.Linear(2, 2, bias=False)]  # not registered
            torch.nn.init.ones_(self.layers[0].weight)

        def forward(self, x):
            return self.layers[0](x * self.scale + self.shifts[0])

    def write(net):
        with torch.no_grad():
            net.layers[0].weight[0] = 5.0

    ported = tpuport.convert(Net())
    eager = Net()
    for edit in (
        lambda net: None,
        lambda net: net.scale.mul_(3),
        lambda net: net.shifts[0].add_(1),
        write,
        lambda net: setattr(net, "scale", torch.full((2,), 7.0)),
    ):
        edit(eager)
        edit(ported.module)
        torch.testing.assert_close(tpuport.to_torch(ported(PLAIN)), eager(PLAIN).detach())


def test_another_memory_of_a_global_counts():
    outside = torch.ones(2)
    ported = tpuport.convert(lambda x: x * outside)
    assert tpuport.to_torch(ported(PLAIN)).tolist() == [1.0, 2.0]
    outside.data = torch.full((2,), 5.0)
    assert tpuport.to_torch(ported(PLAIN)).tolist() == [5.0, 10.0]


class Merging(nn.Module):
    """Adds its adapter to the weight in evaluation mode, as loralib does."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.base, self.merged = nn.Linear(size, size), False
        self.base.weight.requires_grad = False
        self.down = nn.Parameter(torch.full((2, size), 0.1))
        self.up = nn.Parameter(torch.ones(size, 2))

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if mode == self.merged:
            self.base.weight.data += (-1 if mode else 1) * self.up @ self.down
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return y if self.merged else y + (x @ self.down.T) @ self.up.T


def test_a_mode_that_writes_weights_does_so_to_the_port_alone():
    torch.manual_seed(0)
    model, x = Merging(), torch.linspace(-1, 1, 6).view(2, 3)
    before = copy.deepcopy(model.state_dict())
    eager, ported = copy.deepcopy(model), tpuport.convert(model)
    for mode in (True, False, False, True, False):
        eager.train(mode)
        ported.train(mode)
        torch.testing.assert_close(torch.as_tensor(np.asarray(ported(x))), eager(x).detach())
        # The next mode takes the values of now out of the weight, or puts them in.
        ported.params = {name: value * 1.5 for name, value in ported.params.items()}
        with torch.no_grad():
            for parameter in filter(lambda p: p.requires_grad, eager.parameters()):
                parameter.mul_(1.5)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.training
    assert not model.merged


@pytest.mark.parametrize("size", [3, 256])  # a large weight shares its memory with the array
def test_what_the_original_becomes_is_not_the_ports(size: int):
    torch.manual_seed(0)
    model, x = Merging(size), torch.linspace(-1, 1, 2 * size).view(2, size)
    eager, ported = copy.deepcopy(model), tpuport.convert(model, verify=False)
    model.eval()
    with torch.no_grad():
        model.up.mul_(3)
    ported.eval()
    torch.testing.assert_close(tpuport.to_torch(ported(x)), eager.eval()(x).detach())
    weight = ported.module.base.weight
    torch.testing.assert_close(weight, eager.base.weight)
    torch.testing.assert_close(ported.module.up, eager.up)


class Options(nn.Module):
    """Reads what its options hold."""

    def __init__(self) -> None:
        super().__init__()
        self.options = types.SimpleNamespace(power=2.0, flags={"noise": None})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = self.options.flags.get("noise")
        return (x if noise is None else x + noise) * self.options.power


def test_a_namespace_is_an_object_of_attributes() -> None:
    """What was written to a dict in it counted as little as if it were constant."""
    ported, eager = tpuport.convert(Options()), Options()
    x = torch.ones(2)
    for change in ({}, {"noise": 0.5}, {"noise": 3.0}):
        for module in (ported.module, eager):
            module.options.flags.update(change)
        torch.testing.assert_close(tpuport.to_torch(ported(x)), eager(x))
