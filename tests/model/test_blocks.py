"""Repeated blocks: traced once and made a loop, with the numbers that each by itself gives."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpuport
from tests.model.repeated import (
    Beside,
    Block,
    KeepsBeside,
    LastBeside,
    Stack,
    check,
    jaxpr_of,
    loops,
    records,
    x_of,
)
from tpuport.foundation.errors import UsageError


def test_a_chain_of_blocks_is_one_loop():
    ported, found = check(Stack(Block), x_of())
    assert found == [5]
    (record,) = records(ported)
    assert (record.programs, record.shared) == (1, 4)


def test_the_code_of_each_block_runs_once(capsys: pytest.CaptureFixture[str]):
    class Told(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print(self.index)  # noqa: T201
            return super().forward(x)

    ported = tpuport.convert(Stack(Told, 12), verify=False, blocks="once")
    ported(x_of())
    assert capsys.readouterr().out.split() == [str(i) for i in range(12)]
    (record,) = records(ported)
    assert (record.programs, record.shared) == (1, 11)


@pytest.mark.parametrize("blocks", ["auto", "scan", "once", "unroll"])
def test_dropout_draws_other_numbers_in_each_block_and_the_same_as_eager(blocks: str):
    model = Stack(lambda i: Block(i, 0.5)).train()
    ported = tpuport.convert(model, blocks=blocks)
    ported(x_of())
    ported.verify(x_of())
    if blocks == "scan":
        assert loops(jaxpr_of(ported, x_of())) == [5]
    key = jax.random.key(3)
    one = ported.apply(ported.params, ported.buffers, key, x_of())[0]
    plain = tpuport.convert(model, blocks="unroll", verify=False)
    other = plain.apply(plain.params, plain.buffers, key, x_of())[0]
    assert jnp.allclose(one, other, atol=1e-6)


def test_an_attribute_that_nobody_reads_may_differ():
    _, found = check(Stack(lambda i: Block(i)), x_of())
    assert found == [5]


class Scaled(Block):
    """What it computes depends on which block it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.index % 2:
            x = x * 2
        return super().forward(x)


def test_an_attribute_that_is_read_tells_blocks_apart():
    ported, found = check(Stack(Scaled, 6), x_of())
    assert found == [3]  # two blocks a round
    (record,) = records(ported)
    assert (record.programs, record.shared) == (2, 4)


def test_an_attribute_that_is_read_through_its_dict_or_class_tells_blocks_apart():
    class ByDict(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.__dict__["index"]

    class ByClass(Block):
        index = 7

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.index

    for kind in (ByDict, ByClass):
        _, found = check(Stack(kind), x_of())
        assert found == []


class Mode:
    """A plain object on a module, as diffusers' attention processors."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class WithObject(Block):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.mode = Mode(factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.mode.factor


def test_objects_that_hold_the_same_are_the_same():
    assert check(Stack(lambda i: WithObject(1.5)), x_of())[1] == [5]
    assert check(Stack(lambda i: WithObject(i)), x_of())[1] == []


def test_two_kinds_in_turn_are_one_loop_of_both():
    class Kind(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if self.index == 1 else 1)

    ported, found = check(Stack(lambda i: Kind(i % 2), 8), x_of())
    assert found == [4]
    (record,) = records(ported)
    assert (record.programs, record.shared) == (2, 6)


def test_what_stands_between_blocks_is_in_the_loop():
    class Between(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = x
            for block in self.blocks:
                x = block(x) + 0.5 * first
            return self.head(x)

    assert check(Between(Block), x_of())[1] == [5]


def test_every_blocks_result_can_be_an_output():
    class All(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            states = [x]
            for block in self.blocks:
                x = block(x)
                states.append(x)
            return self.head(x), states

    assert check(All(Block), x_of())[1] == [5]


def test_skips_across_blocks_are_read_by_the_way_back():
    class Skips(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for block in self.blocks[:4]:
                x = block(x)
                kept.append(x)
            for block in self.blocks[4:]:
                x = block(x + kept.pop())
            return self.head(x)

    assert check(Skips(Block, 8), x_of())[1] == [4, 4]


def test_a_block_called_out_of_order_or_twice_keeps_its_weights():
    class Order(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in (3, 1, 1, 4, 0):
                x = self.blocks[index](x)
            return self.head(x)

    assert check(Order(Block), x_of())[1] == [5]


def test_blocks_that_pass_something_on_beside():
    class Two(Block):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return super().forward(x) + y.mean(), y

    class Pairs(Stack):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            for block in self.blocks:
                x, y = block(x, y)
            return self.head(x), y

    assert check(Pairs(Two), x_of(), x_of())[1] == [5]


def test_blocks_whose_arguments_are_structures():
    class Structured(Block):
        def forward(self, x: torch.Tensor, extra: Any, *, scale: float) -> Any:
            return super().forward(x) * scale + extra["bias"][0]

    class Top(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            extra = {"bias": (x.mean(-1, keepdim=True), None), "name": "a"}
            for block in self.blocks:
                x = block(x, extra, scale=0.5)
            return self.head(x)

    assert check(Top(Structured), x_of())[1] == [5]


# -- effects ---------------------------------------------------------------------------------------


class Norm(Block):
    """Its buffers change."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(4)


class Writes(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return super().forward(x)


class Keeps(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.amax()
        return super().forward(x)


class Views(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        return x.view(x.shape)


class Buffered(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.amax()
        return super().forward(x)


class Counts(Block):
    def forward(self, x: torch.Tensor, seen: list[Any]) -> torch.Tensor:
        seen.append(self.index)
        return super().forward(x) * len(seen)


@pytest.mark.parametrize("kind", [Writes, Keeps, Views, Buffered])
def test_the_effects_of_a_block_are_results_of_its_program(kind: Any):
    class Top(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = x * 1
            for block in self.blocks:
                x = block(x)
            return self.head(x), x

    ported, found = check(Top(kind).train(), x_of())
    assert found == ([] if kind is Views else [5])  # a view needs no equation
    (record,) = records(ported)
    assert record.programs == 1
    if kind is Keeps:
        kept = [block.last for block in ported.to_torch().blocks]
        model = Top(Keeps).train()
        model(x_of())
        for ours, block in zip(kept, model.blocks, strict=True):
            torch.testing.assert_close(torch.as_tensor(ours), block.last, rtol=1e-5, atol=1e-5)


def test_blocks_whose_running_statistics_change():
    assert check(Stack(Norm).train(), x_of())[1] == [5]
    assert check(Stack(Norm).eval(), x_of())[1] == [5]


def test_a_list_that_blocks_append_to():
    class Top(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen: list[int] = []
            for block in self.blocks:
                x = block(x, seen)
            assert seen == list(range(len(self.blocks)))
            return self.head(x)

    ported, found = check(Top(Counts), x_of())
    assert found == []
    assert records(ported)[0].programs == 5


def test_blocks_that_read_something_traced_from_elsewhere():
    shared: dict[str, Any] = {}

    class Reads(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * shared["scale"]

    class Top(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                shared["scale"] = x.mean()
                x = block(x)
            shared.clear()
            return self.head(x)

    assert check(Top(Reads), x_of())[1] == [5]


def test_blocks_with_hooks_run_them(capsys: pytest.CaptureFixture[str]):
    model = Stack(Block)
    for block in model.blocks:
        block.register_forward_hook(lambda m, i, o: print(m.index) or o * 2)  # noqa: T201
    assert check(model, x_of())[1] == [5]
    assert capsys.readouterr().out.split()[:5] == [str(i) for i in range(5)]


class Scaling(torch.autograd.Function):
    """A function whose backward is no derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:  # pyright: ignore
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore
        return grad * ctx.factor, None


@pytest.mark.parametrize(("step", "programs"), [(0.0, 1), (0.5, 5)])
def test_blocks_may_differ_in_their_backward_alone(step: float, programs: int):
    class Custom(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scaling.apply(super().forward(x), 2.0 + step * self.index)  # pyright: ignore

    ported, found = check(Stack(Custom), x_of())  # compares gradients
    assert found == ([5] if programs == 1 else [])
    assert records(ported)[0].programs == programs


def test_a_branch_on_a_value_inside_a_block():
    class Branches(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                return super().forward(x)
            return x - 1

    for sign in (1.0, -1.0):
        check(Stack(Branches), sign * x_of().abs())


def test_a_check_inside_a_block_still_raises():
    class Checks(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.max() > 100:
                raise ValueError(f"too large in {self.index}")
            return super().forward(x)

    ported = tpuport.convert(Stack(Checks), blocks="scan")
    ported(x_of())
    with pytest.raises(ValueError, match="too large in 0"):
        ported(x_of() * 1000)


# -- transformations, options, stacks --------------------------------------------------------------


def test_checkpoint_around_and_inside_blocks():
    class Inside(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore

    class Around(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)  # type: ignore
            return self.head(x)

    assert check(Stack(Inside), x_of())[1] == [5]
    check(Around(Block), x_of())


def test_frozen_blocks_get_no_gradient():
    model = Stack(Block, 6)
    for block in model.blocks[:3]:
        block.requires_grad_(False)
    ported, found = check(model, x_of())
    assert found == [6]
    assert set(ported.frozen) == {n for n, p in model.named_parameters() if not p.requires_grad}


def test_bfloat16_blocks():
    ported = tpuport.convert(Stack(Block).bfloat16(), blocks="scan")
    ported(x_of().bfloat16())
    assert loops(jaxpr_of(ported, x_of().bfloat16())) == [5]


def test_an_unknown_choice_is_refused():
    with pytest.raises(UsageError, match="blocks is one of 'auto', 'scan'"):
        tpuport.convert(Stack(Block), blocks="all")


def test_a_result_that_something_else_keeps():
    kept: list[Any] = []

    class Keeps(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            kept.append(x)
            return x

    class Top(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            kept.clear()
            for block in self.blocks:
                x = block(x)
            states = list(kept)
            kept.clear()
            return self.head(x), states

    assert check(Top(Keeps), x_of())[1] == [5]


def test_hooks_that_come_during_the_call():
    class Top(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            states: list[torch.Tensor] = []
            keep = lambda module, given, out: states.append(out)  # noqa: E731
            handles = [block.register_forward_hook(keep) for block in self.blocks]
            for block in self.blocks:
                x = block(x)
            for handle in handles:
                handle.remove()
            return self.head(x), states

    check(Top(Block), x_of())


class Unread(Stack):
    """Between blocks something is computed that nobody reads, and blocks run for nothing."""

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for i, block in enumerate(self.blocks):
            if i == 2:
                y = x.cos()
                for other in self.blocks:
                    y = other(y, *rest)
                y.sum()
            x = block(x, *rest)
        return self.head(x)


@pytest.mark.parametrize(
    ("model", "expected"),
    [(KeepsBeside(Beside), [4]), (LastBeside(Beside), [4]), (Unread(Block), [5])],
    ids=["of the last", "of the others", "of all"],
)
def test_what_nobody_reads(model: nn.Module, expected: list[int]):
    _, found = check(model, x_of())
    assert found == expected
