"""Calls of torch_xla and what the codemod writes for them."""

import importlib.util
import textwrap
from pathlib import Path

import pytest
from libcst.codemod import CodemodTest

from tpuport.migrate.torch_xla import MigrateTorchXla, migrate
from tpuport.rules._torch_xla_facts import COUNTERPARTS, NEEDLESS

IMPORTS = """
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
import torch_xla.utils.utils as xu
"""


class TestMigrateTorchXla(CodemodTest):
    TRANSFORM = MigrateTorchXla

    def test_calls_statements_and_scopes(self):
        before = """
            import torch_xla
            import torch_xla.core.xla_model as xm
            from torch_xla import runtime as xr


            def train(index, loader, model, optimizer):
                device = xm.xla_device()
                for x in loader:
                    with torch_xla.step():
                        model(x.to(device)).sum().backward()
                        xm.optimizer_step(optimizer, barrier=True)
                xm.mark_step()
                if xm.is_master_ordinal() and index < xr.world_size():
                    xm.save(model.state_dict(), "a.pt")


            torch_xla.launch(train, args=(loader, model, optimizer))
        """
        after = """
            import jax
            import torch


            def train(index, loader, model, optimizer):
                device = torch.device("cpu")
                for x in loader:
                    model(x.to(device)).sum().backward()
                    optimizer.step()
                if (jax.process_index() == 0) and index < jax.process_count():
                    torch.save(model.state_dict(), "a.pt")


            train(0, loader, model, optimizer)
        """
        self.assertCodemod(before, after)
        self.assertCodemod(after, after)

    def test_code_without_torch_xla_stays(self):
        code = """
            from my_library import mark_step, xm


            def train(optimizer):
                mark_step()
                xm.optimizer_step(optimizer)
        """
        self.assertCodemod(code, code)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = pl.MpDeviceLoader(loader, device)", "x = loader"),
        ("x = pl.ParallelLoader(loader, [d]).per_device_loader(d)", "x = loader"),
        ("x = xu.SampleGenerator(data=d, sample_count=a // b)", "x = [d] * (a // b)"),
        ("xmp.spawn(f, nprocs=8)", "f(0)"),
        ("xm.add_step_closure(f, args=(a, b), run_async=True)", "f(a, b)"),
        ("xm.add_step_closure(f)", "f()"),
        ("xm.master_print('a', b)", "print('a', b)"),
        ("xr.initialize_cache('/tmp/c')", "tpuport.compile_cache('/tmp/c')"),
        ("x = xr.global_runtime_device_count()", "x = jax.device_count()"),
        ("if a:\n    print(met.metrics_report())", "if a:\n    pass"),
        ("if a:\n    xm.rendezvous('x')", None),
        ("x = xm.optimizer_step(optimizer)", None),
        ("xm.optimizer_step(optimizer, optimizer_args={'a': 1})", None),
        ("x = xs.mark_sharding(y, mesh, ('data', None))", None),
        ("xr.initialize_cache('/tmp/c', readonly=True)", None),
        ("x = xm.xla_device", None),
        ("x = map(xm.all_gather, y)", None),
        ("x = xm.mesh_reduce('a', y, sum)", None),
    ],
)
def test_a_call_is_replaced_or_stays_with_a_note(before, after):
    (made,) = migrate({"a.py": f"{IMPORTS}\n{before}\n"}).values()
    if after is not None:
        assert "torch_xla" not in made.after
        assert made.after.rstrip().endswith(after)
        return
    assert made.after.rstrip().endswith(before)
    (left,) = [note.text for note in made.left if "stays" in note.text]
    assert "What to write: " in left
    (again,) = migrate({"a.py": made.after}).values()
    assert again.after == made.after


def test_every_name_has_one_answer_which_the_page_shows():
    assert not COUNTERPARTS.keys() & NEEDLESS.keys()
    path = Path(__file__).parents[2] / "docs/generate_torch_xla.py"
    spec = importlib.util.spec_from_file_location("generate_torch_xla", path)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "run `make docs`"


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("from torch_xla.core.xla_model import *\nd = xla_device()\n", "is not known"),
        (
            "try:\n    import torch_xla\n    HAS = True\nexcept ImportError:\n    HAS = False\n",
            "asks",
        ),
        ("import torch_xla\nd = x.device.type == 'xla'\n", "'xla' stays"),
    ],
)
def test_what_depends_on_torch_xla_in_other_ways_is_noted(text, note):
    (made,) = migrate({"a.py": text}).values()
    assert made.after.splitlines()[-1] == text.splitlines()[-1]
    assert [one for one in made.left if note in one.text]


def test_comments_and_the_look_of_a_file_stay():
    text = textwrap.dedent("""
        # A script.
        import torch_xla.core.xla_model as xm  # for devices


        def f(x):   # two   spaces
          d = xm.xla_device()  # the device
          return x.to( d )
    """)
    (made,) = migrate({"a.py": text}).values()
    kept = text[text.index("def f") :].replace("xm.xla_device()", 'torch.device("cpu")')
    assert made.after.endswith(kept)
    assert made.after.lstrip().startswith("# A script.")
