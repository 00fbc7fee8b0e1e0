"""Training steps that are moved train to the same losses, and others stay with the reason."""

import numpy as np
import pytest

from tests.migrate.running import migrate_folder, migrated_losses, original_losses
from tpuport.migrate.torch_xla import migrate

BASE = '''
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.runtime as xr
import torch_xla.utils.utils as xu


class Trainer:
    """Trains."""

    def __init__(self):
        self.device = torch_xla.device()
        data = (torch.randn(8, 4), torch.randint(3, (8,)))
        self.loader = pl.MpDeviceLoader(xu.SampleGenerator(data, 3), self.device)
        layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
        self.model = torch.nn.Sequential(*layers).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.loss_fn = torch.nn.CrossEntropyLoss()
        self.step = torch_xla.compile(self.step_fn)
        self.seen = []

    def update(self):
        xm.optimizer_step(self.optimizer)

    def step_fn(self, data, target):
        """Take a step."""
        self.optimizer.zero_grad()
        output = self.model(data)
        loss = self.loss_fn(output, target)
        loss.backward()
        xm.reduce_gradients(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.update()
        return loss

    def train(self):
        self.model.train()
        for number, (data, target) in enumerate(self.loader):
            loss = self.step(data, target)
            if number % 2 == 0:
                xm.add_step_closure(self.seen.append, args=(loss,))
        xm.wait_device_ops()
        assert [isinstance(one.item(), float) for one in self.seen] == [True] * 2


def main(index):
    Trainer().train()


if __name__ == "__main__":
    torch_xla.launch(main)
'''
EXTENDED = """
import numpy as np
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from base import Trainer

xr.use_spmd()


class Spread(Trainer):
    def __init__(self):
        super().__init__()
        count = xr.global_runtime_device_count()
        mesh = xs.Mesh(np.arange(count), (count,), ("batch",))
        self.loader = pl.MpDeviceLoader(
            self.loader, self.device, input_sharding=xs.ShardingSpec(mesh, ("batch", None))
        )


Spread().train()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    migrate_folder({"src/base.py": BASE, "src/extended.py": EXTENDED}, folder)
    return folder


@pytest.mark.filterwarnings("ignore:torch_xla. one process runs")
def test_a_moved_step_has_the_losses_of_the_original(folder):
    expected = original_losses(folder / "before/src/base.py")
    assert len(expected) == 3
    assert len(set(expected)) == 3
    for name in ("base", "extended"):
        got = migrated_losses(folder / f"after/src/{name}.py")
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_what_was_moved(folder):
    text = (folder / "after/src/base.py").read_text()
    assert "torch_xla" not in text
    assert "clip_norm=0.5," in text
    assert "def update" not in text
    assert "self.seen.append(tpuport.to_torch(loss))" in text
    assert "jax.block_until_ready(self.train_state)" in text
    extended = (folder / "after/src/extended.py").read_text()
    assert "tpuport.shard(ported, **self.sharding)" in extended


def test_a_second_migration_changes_nothing(folder):
    files = [folder / f"after/src/{name}.py" for name in ("base", "extended")]
    texts = {str(file): file.read_text() for file in files}
    assert {name: (one.after, one.left) for name, one in migrate(texts).items()} == {
        name: (text, ()) for name, text in texts.items()
    }


# What is not proved is not moved.

CHANGES = {
    "the weights are read": (
        "        xm.wait_device_ops()",
        "        xm.wait_device_ops()\n        xm.save(self.model.state_dict(), 'a')",
        "self.model.state_dict",
    ),
    "evaluation": ("self.model.train()", "self.model.eval()", "self.model.eval"),
    "a scheduler": (
        "        self.model.train()",
        "        self.scheduler = Schedule(self.optimizer)",
        "`self.optimizer` is used outside",
    ),
    "two backward passes": (
        "        self.update()",
        "        self.update()\n        self.other.backward()",
        "is no part of an update",
    ),
    "a branch before the update": (
        "        self.update()",
        "        if self.ready:\n            self.update()",
        "is no part of an update",
    ),
    "a norm that may change": (", 0.5)", ", self.norm)", "not a number"),
    "another norm": (", 0.5)", ", 0.5, norm_type=1.0)", "with options"),
    "clipping after the update": (
        "        self.update()\n",
        "        self.update()\n"
        "        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1)\n",
        "after the update",
    ),
    "another result": ("return loss", "return output", "something else than the loss"),
    "the loss keeps something": (
        "        loss.backward()",
        "        self.last = output\n        loss.backward()",
        "sets `self.last`",
    ),
    "autocast": (
        "        output = self.model(data)",
        "        with torch_xla.amp.autocast('xla'):\n            output = self.model(data)",
        "the loss uses",
    ),
    "a helper that does more": (
        "        xm.optimizer_step(self.optimizer)",
        "        xm.optimizer_step(self.optimizer)\n        self.count += 1",
        "`self.update()` is no part",
    ),
    "some of the parameters": (
        "(self.model.parameters(), lr",
        "(self.model[0].parameters(), lr",
        "parameters of one attribute",
    ),
    "an optimizer made again": (
        "        self.model.train()",
        "        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1)",
        "needs the weights outside",
    ),
    "the model from outside": (
        "    Trainer().train()",
        "    one = Trainer()\n    one.train()\n    print(one.model)",
        "`one.model` may be",
    ),
    "a model of someone else": (
        "torch.nn.Sequential(*layers).to(self.device)",
        "made.to(self.device)",
        "may have other owners",
    ),
    "something logged": (
        "        loss.backward()",
        "        self.log(loss)\n        loss.backward()",
        "`self.log(loss)` is no part of a loss",
    ),
    "something taken": ("self.model(data)", "self.model(next(self.more))", "`next(self.more)` may"),
    "a method": ("self.model(data)", "self.model(self.update(data))", "`self.update(data)` may"),
    "the device by name": (
        "self.model(data)",
        "self.model(data.to('xla'))",
        "names the device 'xla'",
    ),
    "a base elsewhere": ("class Trainer:", "class Trainer(Runner):", "extends Runner, which is in"),
    "another name for it": (
        "        self.seen = []",
        "        self.seen = [self.model]",
        "needs the weights outside",
    ),
    "an argument with a default": ("data, target):", "data, target=None):", "has a default"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_does_more_stays(change):
    old, new, reason = CHANGES[change]
    assert old in BASE
    (made,) = migrate({"a.py": BASE.replace(old, new, 1)}).values()
    assert "make_train_step" not in made.after
    (left,) = [note.text for note in made.left if "stays in eager PyTorch" in note.text]
    assert reason in left


def test_a_class_that_extends_the_step_keeps_it_from_moving():
    more = "from base import Trainer\n\nclass More(Trainer):\n    def update(self):\n        pass\n"
    made = migrate({"base.py": BASE, "more.py": more})["base.py"]
    assert "make_train_step" not in made.after
    assert any("More.update does more than a step (more.py:4)" in n.text for n in made.left)


def test_a_result_that_is_used_at_once_becomes_a_tensor():
    text = BASE.replace("xm.add_step_closure(self.seen.append, args=(loss,))", "print(loss.item())")
    (made,) = migrate({"a.py": text}).values()
    assert "loss = tpuport.to_torch(self.step(data, target))" in made.after
    text = BASE.replace("xm.wait_device_ops()", "print(list(map(self.step, [], [])))")
    (made,) = migrate({"a.py": text}).values()
    assert 'return tpuport.to_torch(metrics["loss"])' in made.after
