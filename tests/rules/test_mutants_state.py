"""The rules about state, views and gradients: their fixes help, and wrong fixes are noticed."""

import warnings
from pathlib import Path

import pytest
import torch

from tpuport.rules._apply import find, rewrite
from tpuport.rules._rule import Example
from tpuport.rules.no_grad_as_stop_gradient import NoGradAsStopGradient
from tpuport.rules.tensor_in_forward import TensorInForward
from tpuport.rules.write_through_view import WriteThroughView
from tpuport.testing import equivalence
from tpuport.testing.harms import HARMS

VIEW, SUBSCRIPT = WriteThroughView.EXAMPLES[:2]
GRADIENT = NoGradAsStopGradient.EXAMPLES[0]
DEVICE = TensorInForward.EXAMPLES[0]


def harm_of(source: str, example: Example, folder: Path) -> str | None:
    """What the example's harm says of another source: None if the harm is there."""
    assert example.harm is not None
    function = equivalence.load(source, folder)
    return HARMS[example.harm](function, equivalence.make_inputs(example.inputs, seeds=2))


@pytest.mark.parametrize("example", [VIEW, SUBSCRIPT, GRADIENT])
def test_the_fix_removes_the_harm_under_plain_torchax(example: Example, tmp_path: Path):
    assert harm_of(example.before, example, tmp_path) is None
    assert harm_of(example.after or "", example, tmp_path) is not None


def test_the_fix_lets_tensors_meet_under_plain_torchax(tmp_path: Path):
    (args,) = equivalence.make_inputs(DEVICE.inputs, seeds=1)
    before, after = (
        equivalence.load(source, tmp_path) for source in (DEVICE.before, DEVICE.after or "")
    )
    with pytest.raises(AssertionError, match="mixed math"):
        equivalence.plain_jit(before, args)
    assert equivalence.difference(before(*args), equivalence.plain_jit(after, args)) is None


# Changes of the fixed source that leave the harm in.
USELESS = {
    "base not bound again": (VIEW, "    y = rows.view(y.shape)\n", ""),
    "gradient of the product flows": (GRADIENT, "(x * 2).detach()", "x * 2"),
    "gradient of the softmax flows": (GRADIENT, "dim=-1).detach()", "dim=-1)"),
}


@pytest.mark.parametrize(("example", "old", "new"), USELESS.values(), ids=USELESS)
def test_a_useless_fix_is_noticed(example: Example, old: str, new: str, tmp_path: Path):
    assert example.after is not None
    assert old in example.after
    assert harm_of(example.after.replace(old, new), example, tmp_path) is None


# Changes that give another result in eager PyTorch.
WRONG = {
    "wrong fill value": (SUBSCRIPT, "] = 0\n", "] = 1e-7\n"),
    "wrong place": (SUBSCRIPT, "y[..., 0] = ", "y[..., 1] = "),
    "mask turned round": (SUBSCRIPT, "x[..., 1:] > 0", "x[..., 1:] <= 0"),
    "write dropped": (SUBSCRIPT, "    y[..., :2] = 0\n", ""),
    "view of the wrong tensor": (VIEW, "y = rows.view(y.shape)", "y = x.view(y.shape)"),
    "wrong tensor detached": (GRADIENT, "(x * 2).detach()", "x * 2.0000002"),
    "constants lost": (DEVICE, "[1.0, 2.0, 3.0, 4.0]", "[1.0, 2.0, 3.0, 3.0]"),
    "wrong dtype": (DEVICE, "dtype=torch.float32", "dtype=torch.float64"),
}


@pytest.mark.parametrize(("example", "old", "new"), WRONG.values(), ids=WRONG)
def test_a_wrong_fix_is_noticed(example: Example, old: str, new: str, tmp_path: Path):
    assert example.after is not None
    assert old in example.after
    before = equivalence.load(example.before, tmp_path)
    mutant = equivalence.load(example.after.replace(old, new), tmp_path)
    with pytest.raises(equivalence.DifferenceError):
        equivalence.check_eager(before, mutant, equivalence.make_inputs(example.inputs))


# Aliases: others would not see a base that is bound again.
ALIASED = {
    "another name": "other = y",
    "kept in a list": "kept = [y]",
    "captured": "read = lambda: y",
}


@pytest.mark.parametrize("alias", ALIASED.values(), ids=ALIASED)
def test_a_base_that_others_see_is_left(alias: str):
    source = VIEW.before.replace("    rows = ", f"    {alias}\n    rows = ", 1)
    result = rewrite(source, rules=[WriteThroughView])
    assert result.source == source
    assert "other names may refer to y" in result.left[0].reason


def test_a_view_that_may_be_a_copy_is_left():
    source = VIEW.before.replace("unsqueeze(0)", "reshape(-1)")
    result = rewrite(source, rules=[WriteThroughView])
    assert result.source == source
    assert "may be a copy" in result.left[0].reason


# The rule says of each form what torchax does.
FORMS = {
    **{
        name: f"part = y.{name}\n    part += 1"
        for name in (
            *("view(-1)", "reshape(4, 3)", "flatten()", "unsqueeze(0)", "squeeze()", "t()", "T"),
            *("transpose(0, 1)", "permute(1, 0)", "movedim(0, 1)", "narrow(0, 0, 2)", "mT"),
            *("select(0, 1)", "diagonal()", "expand(3, 4)", "unfold(1, 2, 2)", "unbind(1)[2]"),
            *("split(2)[0]", "view(4, 3)[1:]", "view_as(y)", "unflatten(1, (2, 2))"),
            *("contiguous()", "clone()", "float()", "detach().clone()", "abs()"),
        )
    },
    "subscript": "part = y[1:]\n    part += 1",
    "subscript of a subscript": "y[1:][:, 2:].mul_(3)",
    "column": "y[:, 0] += 1",
    "element": "y[0, 1] = 5.0",
    "new dimension": "part = y[:, None]\n    part[0] = 1.0",
    **{
        f"subscript with {name}": f"y[1:].{name}"
        for name in (
            *("zero_()", "fill_(2.0)", "masked_fill_(x[1:] > 0, 0.5)", "addcmul_(x[1:], x[1:])"),
            *(
                "tril_()",
                "sgn_()",
                "add_(1)",
                "clamp_(0, 1)",
                "copy_(x[1:])",
                "pow_(2)",
                "sigmoid_()",
            ),
            *("lerp_(x[1:], 0.5)", "nan_to_num_()", "relu_()", "div_(2.0)", "fill_diagonal_(0.0)"),
        )
    },
    "write without a name": "y.view(-1)[3] = 7.0",
    "parts": "first, second = y.chunk(2, dim=1)\n    first += 1",
    "base after its view": "part = y.view(-1)\n    y.mul_(2)\n    y = part.sum() + y",
    "base after its subscript": "part = y[1:]\n    y.mul_(2)\n    y = part.sum() + y",
    "name for the whole": "part = y\n    part += 1",
    "base not read": "y = y.view(4, 3)\n    y += 1",
}


@pytest.mark.parametrize("lines", FORMS.values(), ids=FORMS)
def test_what_is_found_is_what_torchax_loses(lines: str, tmp_path: Path):
    source = f"import torch\n\n\ndef forward(x):\n    y = x * 2\n    {lines}\n    return y\n"
    found = find(source.replace("(x)", "(x: torch.Tensor)"), rules=[WriteThroughView])
    inputs = equivalence.make_inputs("(torch.randn(3, 4),)", seeds=1)
    inputs += equivalence.make_inputs("(torch.randn(3, 4).log(),)", seeds=1)  # with NaN
    is_lost = HARMS["differs"](equivalence.load(source, tmp_path), inputs) is None
    assert bool(found) == is_lost


# The harms say so where code is well.


class Steady(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: torch.Tensor):
        return x * self.table


def freeze_all_but_held(x: torch.Tensor):
    del x
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model, torch.optim.SGD(model[1].parameters(), lr=0.1)


class Loop:
    def __init__(self):
        self.model = Steady()

    def main(self, x: torch.Tensor):
        for _ in range(4):
            x = self.model(x)
        return x


HEALTHY = {
    "forgets": (Steady, "every call gives"),
    "leaks": (Steady, "a second trace runs"),
    "second_trace_differs": (Steady, "both programs give"),
    "gradient_flows": (lambda: torch.sin, "gives the gradient"),
    "freezes": (lambda: torch.rand_like, "two calls of the program differ"),
    "trains_frozen": (lambda: freeze_all_but_held, "holds no frozen parameter"),
    "retraces": (lambda: Loop().main, "one program serves several calls"),
}


@pytest.mark.parametrize(("harm", "case"), HEALTHY.items(), ids=HEALTHY)
def test_a_harm_is_not_seen_where_there_is_none(harm: str, case: tuple):
    make, reason = case
    inputs = equivalence.make_inputs("(torch.randn(3, 4),)", seeds=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert reason in (HARMS[harm](make(), inputs) or "")


def test_a_checkpoint_of_jax_is_seen():
    import jax
    from torchax import interop

    def block(x: torch.Tensor):
        return interop.torch_view(jax.checkpoint(interop.jax_view(torch.sin)))(x) * 2

    (args,) = equivalence.make_inputs("(torch.randn(3, 4),)", seeds=1)
    assert HARMS["keeps_activations"](block, [args]) == "the program has a checkpoint"
