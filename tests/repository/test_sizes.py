"""Small sizes for a script, and the values that it requires, found in its source."""

import textwrap
from pathlib import Path

import pytest

from tpuport.foundation.errors import UsageError
from tpuport.repository.hydra_files import config_names, find_config
from tpuport.repository.scripts import StartScript, add_packages, find_scripts
from tpuport.repository.sizes import ChosenArguments, choose_arguments, read_settings
from tpuport.repository.slices import next_slice

ARGPARSE = """
    import argparse
    import models

    parser = argparse.ArgumentParser()
    parser.add_argument("--data-path", type=str, required=True)
    parser.add_argument("--kind", choices=["one", "two"], required=True)
    parser.add_argument("--rate", required=True)
    parser.add_argument("--model", default="Net-XL/2")
    parser.add_argument("--image-size", type=int, choices=[256, 128], default=256)
    parser.add_argument("--global-batch-size", type=int, default=256)
    parser.add_argument("--num_workers", "-j", type=int, default=8)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--no-ema", action="store_false", dest="ema")
    if __name__ == "__main__":
        loss.backward()
    """
MODELS = """
    sizes = {"Net-XL/2": 1, "Net-S/2": 2, "Net-S/8": 3, "Other-S/9": 4}
    """
GLOBALS = """
    batch_size = 12
    accumulation_steps = 5 * 8
    n_layer, rate = 12, 0.1
    n_head = 12
    n_embd = 768
    compile = True
    eval_iters = 200
    exec(open("configurator.py").read())
    depth = 12
    for step in range(3):
        loss.backward()
    """
HYDRA = """
    import hydra

    FOLDER = "conf"

    @hydra.main(config_path=FOLDER, config_name="base")
    def main(config):
        loss.backward()
    """


def entry(root: Path, script: str, **files: str) -> tuple[StartScript, ChosenArguments]:
    arguments = files.pop("arguments", "").split()
    changes = dict(pair.split("=") for pair in files.pop("changes", "").split())
    (root / "train.py").write_text(textwrap.dedent(script))
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_yaml", ".yaml").replace("_py", ".py")
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(text))
    found = find_scripts(root, sorted(root.rglob("*.py")))[0]
    modules = [root / name for name in found.modules]
    settings = read_settings(root / found.path, modules, found, arguments)
    return found, choose_arguments(settings, found, arguments, changes)


def test_argparse(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("python train.py --rate 0.1 --data-path /path/to/data\n")
    _, chosen = entry(tmp_path, ARGPARSE, models_py=MODELS, changes="fast=true no_ema=false")
    full = ["--fast", "--no-ema", "--data-path", "made-up-data_path", "--kind", "one"]
    assert chosen.full == (*full, "--rate", "0.1")
    assert chosen.small[len(chosen.full) :] == (
        *("--model", "Net-S/8", "--image-size", "128", "--global-batch-size", "4"),
    )
    assert chosen.invented == (
        "data-path: made-up-data_path, a path that is not there",
        "kind: one, the first of 2 choices",
        "rate: 0.1, as in README.md:1",
    )
    assert chosen.lacking == ()
    # What the repository does not give is left to a person where it is for more than a comparison.
    blanks = [(one.variable, one.value) for one in chosen.blanks]
    assert blanks == [("FILL_IN_DATA_PATH", "made-up-data_path"), ("FILL_IN_KIND", "one")]
    launched = ["--data-path", "FILL_IN_DATA_PATH", "--kind", "FILL_IN_KIND", "--rate", "0.1"]
    assert chosen.launched[2:] == tuple(launched)


def test_what_is_given_is_not_made_smaller(tmp_path: Path) -> None:
    given = "--data-path here --kind=two --global-batch-size 8"
    _, chosen = entry(tmp_path, ARGPARSE, arguments=given, changes="num-workers=3")
    assert chosen.full == (*given.split(), "--num_workers", "3")
    assert not {"--global-batch-size", "--num_workers"} & set(chosen.small[len(chosen.full) :])
    assert chosen.lacking == ("rate",)


def test_switches_and_unknown_settings(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it is a switch, true or false; got 3"):
        entry(tmp_path, ARGPARSE, changes="fast=3")
    with pytest.raises(UsageError, match="--set rat: the script has data-path, fast"):
        entry(tmp_path, ARGPARSE, changes="rat=3")


def test_globals_that_a_file_overrides(tmp_path: Path) -> None:
    _, chosen = entry(tmp_path, GLOBALS, changes="rate=0.2")
    assert chosen.full == ("--rate=0.2",)
    assert set(chosen.small[1:]) == {
        *("--batch_size=4", "--accumulation_steps=2", "--eval_iters=1"),
        *("--n_embd=64", "--n_head=2"),
    }


def test_hydra(tmp_path: Path) -> None:
    found, chosen = entry(
        tmp_path,
        HYDRA,
        conf__base_yaml="""
            defaults: [_self_, {net: small}]
            loader: {batch_size: 64, num_workers: 8}
            training: {num_epochs: 50}
            net: {down_dims: [512, 1024, 2048], image_size: [256, 256], mlp_dims: [100, 200]}
            """,
        conf__net__small_yaml="_target_: own.Net\nother: {_target_: absent_package.sub.Thing}\n",
        own_py="import also_absent, absent_too.utils, here.there",
        env__absent_too__other_py="",
        env__here__there_py="",
        changes="loader.batch_size=16",
    )
    assert chosen.full == ("loader.batch_size=16",)
    smaller = ("training.num_epochs=2", "net.down_dims=[64,128,256]")
    assert chosen.small[1:] == smaller
    config = find_config(tmp_path / "train.py", found)
    assert config is not None
    assert config.targets() == {"own.Net", "absent_package.sub.Thing"}
    files = sorted(tmp_path.rglob("*.py"))
    missing = add_packages(found, tmp_path, files, config.targets()).missing
    assert set(missing) - {"hydra"} == {"absent_package", "absent_too", "also_absent"}
    assert config_names(tmp_path / "train.py") == ["base"]


def test_the_next_slice() -> None:
    def compiled(peak: int) -> dict[str, object]:
        return {"peak": peak, "memory": {"available": 16, "refused": 0}}

    assert next_slice("v6e-1", compiled(20)) == "v6e-4"
    # What eight chips cannot hold if half of it were divided is not compiled for four.
    assert next_slice("v6e-1", compiled(200)) == "v6e-8"
    assert next_slice("v5e-256", compiled(20)) is None


def test_a_name_in_camel_case_is_a_size_too(tmp_path: Path) -> None:
    script = """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--batchSize", type=int, default=64)
        parser.add_argument("--nThreads", type=int, default=3)
        for step in range(3):
            loss.backward()
        """
    assert entry(tmp_path, script)[1].small == ("--batchSize", "4")


def argparse_script(options: str, body: str = "") -> str:
    return textwrap.dedent(
        """
        import argparse
        parser = argparse.ArgumentParser()
        {options}
        args = parser.parse_args()
        for step in range(3):
            loss.backward()
        {body}
        """
    ).format(options=options, body=textwrap.dedent(body))


DATASET = "parser.add_argument('--dataset', '-d', required=True{})"


@pytest.mark.parametrize(
    ("more", "body", "value"),
    [
        (", help='cifar10 | lsun | mnist |imagenet | folder | lfw | fake'", "", "fake"),
        (", help='one of: cifar10, synthetic-images or mnist'", "", "synthetic-images"),
        (", help='the data (MNIST, FakeData)'", "", "FakeData"),
        (", choices=['cifar10', 'dummy']", "", "dummy"),
        (", choices=list(TABLE)", "TABLE = {'cifar10': 1, 'random': 2}", "random"),
        ("", "if args.dataset == 'cifar10': pass\nelif args.dataset == 'fake': pass", "fake"),
        ("", "if str(args.dataset).lower() not in ['lsun', 'toy']: pass", "toy"),
        ("", "match args.dataset:\n    case 'a' | 'synth': pass", "synth"),
    ],
)
def test_a_choice_that_needs_no_data(tmp_path: Path, more: str, body: str, value: str) -> None:
    script = argparse_script(DATASET.format(more), body)
    _, chosen = entry(tmp_path, script)
    assert chosen.full == ("--dataset", value)
    assert chosen.invented == (f"dataset: {value}, the choice that needs no data",)
    assert chosen.launched == ("--dataset", "FILL_IN_DATASET")
    assert value in chosen.blanks[0].choices
    # A person's own value, under another name of the option, is the only one.
    assert entry(tmp_path, script, arguments="-d cifar10")[1].full == ("-d", "cifar10")


def test_what_the_repository_starts_comes_before_a_choice(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python train.py -d cifar10\n")
    for more in ("", ", help='cifar10 | fake'", ", choices=['fake', 'cifar10']"):
        _, chosen = entry(tmp_path, argparse_script(DATASET.format(more)))
        assert chosen.full == chosen.launched == ("--dataset", "cifar10")
        assert chosen.invented == ("dataset: cifar10, as in run.sh:1",)
        assert chosen.blanks == ()
    # One that the script refuses today does not.
    _, chosen = entry(tmp_path, argparse_script(DATASET.format(", choices=['fake', 'lsun']")))
    assert chosen.full == ("--dataset", "fake")


def test_a_choice_of_zero_and_one_is_no_size(tmp_path: Path) -> None:
    options = "parser.add_argument('--pos', type=int, choices=[0, 1], default=1)\n"
    options += "parser.add_argument('--scale', type=int, choices=[2, 4], default=4)\n"
    _, chosen = entry(tmp_path, argparse_script(options))
    assert chosen.changed == ("scale: 4 to 2",)


def test_required_values_are_of_one_line(tmp_path: Path) -> None:
    """What two lines give need not go together: a task that has no training, and a model."""
    required = [f"parser.add_argument('--{n}', required=True)\n" for n in ("task", "model", "data")]
    (tmp_path / "README.md").write_text(
        "```\npython train.py --task forecast --more 1\n"
        "python train.py --task train --model net\n"
        "python train.py --model other --data there\n```\n"
    )
    _, chosen = entry(tmp_path, argparse_script("".join(required)))
    assert chosen.full == ("--task", "train", "--model", "net", "--data", "there")


@pytest.mark.parametrize(
    ("more", "body", "lacking"),
    [
        (", help='cifar10 | lsun'", "", "dataset (one of cifar10, lsun)"),
        (", choices=['a', 'b']", "", "dataset (one of a, b)"),
        (", choices=known()", "", "dataset"),
        (
            "",
            "if args.dataset == 'lsun' or 'c10' == args.dataset: pass",
            "dataset (one of lsun, c10)",
        ),
    ],
)
def test_which_data_to_train_on_is_asked(
    tmp_path: Path, more: str, body: str, lacking: str
) -> None:
    _, chosen = entry(tmp_path, argparse_script(DATASET.format(more), body))
    assert chosen.lacking == (lacking,)
    assert chosen.full == ()


def test_other_choices(tmp_path: Path) -> None:
    options = "\n".join(
        f"parser.add_argument({one}, required=True)"
        for one in (
            "'--mode', choices=['eval', 'train']",
            "'--task'",
            "'--norm', help='layer | batch'",
            "'--image-dir', help='train | test'",
        )
    )
    _, chosen = entry(tmp_path, argparse_script(options, "if args.task == 'copy': pass"))
    assert chosen.full == (
        *("--mode", "train", "--task", "copy"),
        *("--image-dir", "made-up-image_dir"),
    )
    # A help text alone is no ground to choose by, and a place is none of the words in it.
    assert chosen.lacking == ("norm (one of layer, batch)",)
    made = entry(tmp_path, argparse_script("parser.add_argument('image_dir', help='a | b')"))[1]
    assert made.full == ("made-up-image_dir",)


def test_a_launch_that_a_document_shows(tmp_path: Path) -> None:
    options = "\n".join(
        f"parser.add_argument({one})"
        for one in ("'data'", "'--arch', choices=['a', 'b'], required=True")
    )
    (tmp_path / "README.md").write_text("python train.py cifar10 --arch=b\n")
    assert entry(tmp_path, argparse_script(options))[1].full == ("cifar10", "--arch", "b")
    (tmp_path / "README.md").write_text("python train.py [data] --arch ARCH\n")
    _, chosen = entry(tmp_path, argparse_script(options))
    assert chosen.full == ("made-up-data", "--arch", "a")


def test_what_hydra_requires(tmp_path: Path) -> None:
    conf = "net: {depth: 1}\ndata:\n  name: ???\n  folder: ???\nseed: ???\n"
    script = HYDRA + "    print(config.data.name == 'fake', cfg['name'] in ('a', 'b'))\n"
    _, chosen = entry(tmp_path, script, conf__base_yaml=conf)
    assert chosen.lacking == ("seed",)
    assert chosen.full == ("data.name=fake", "data.folder=made-up-folder")
    assert chosen.launched == (*("data.name=FILL_IN_DATA_NAME", "data.folder=FILL_IN_DATA_FOLDER"),)


def test_a_size_that_was_given_in_camel_case_stays(tmp_path: Path) -> None:
    script = argparse_script("parser.add_argument('--batchSize', type=int, default=64)")
    assert entry(tmp_path, script, arguments="--batchSize 8")[1].small == ("--batchSize", "8")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("'--accel', action='store_true', default=False", ("--accel",)),
        ("'--use-cuda', action='store_true'", ("--use-cuda",)),
        ("'--cuda', type=bool, default=False", ("--cuda", "True")),
        ("'--device', default='cpu'", ("--device", "cuda")),
        ("'--device', default='cpu', choices=['cpu', 'gpu']", ("--device", "gpu")),
        ("'--device', default='cpu', choices=['cpu', 'mps']", ()),
        ("'--device', default='cuda:0'", ()),
        ("'--no-cuda', action='store_true'", ()),
        ("'--cuda', action='store_false'", ()),
        ("'--gpu', type=int", ()),
    ],
)
def test_the_accelerator_is_asked_for(tmp_path: Path, option: str, words: tuple[str, ...]) -> None:
    """Nothing is ported otherwise, in the comparison as little as on a slice."""
    script = argparse_script(f"parser.add_argument({option})")
    chosen = entry(tmp_path, script)[1]
    assert chosen.full == chosen.launched == words
    assert len(chosen.invented) == bool(words)
    if len(words) == 2:
        given = f"{words[0]}=cpu"
        assert entry(tmp_path, script, arguments=given)[1].full == (given,)


def test_a_global_that_names_the_cpu(tmp_path: Path) -> None:
    script = GLOBALS.replace("compile = True", "device = 'cpu'")
    assert entry(tmp_path, script)[1].full == ("--device=cuda",)


@pytest.mark.parametrize(
    "folder",
    [
        'str(pathlib.Path(__file__).parent.joinpath("own", "conf"))',
        'os.path.join(os.path.dirname(os.path.abspath(__file__)), "own/conf")',
        'f"{X}" if X else Y',
    ],
)
def test_where_hydra_looks(tmp_path: Path, folder: str) -> None:
    script = HYDRA.replace('FOLDER = "conf"', f"FOLDER = {folder}")
    _, chosen = entry(tmp_path, script, own__conf__base_yaml="loader: {batch_size: 64}\n")
    assert chosen.small == (("loader.batch_size=4",) if "Path" in folder or "os" in folder else ())


def test_hydra_as_the_repository_starts_it(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "export SPLIT=train\nexport ROOT='/path/to/data'\n"
        "torchrun --nproc_per_node=8 train.py --multirun lr=1,2\n"
        "torchrun --nproc_per_node=8 train.py --config-name=elsewhere\n"
        "torchrun --nproc_per_node=8 $ROOT/train.py --config-name full net=large split=$SPLIT \\\n"
        '   net.size=7 trainer.devices=8 data_path="/path/to/data" hydra.run.dir=x > log.txt 2>&1\n'
    )
    files = {
        "conf__full_yaml": """
            defaults:
              - net: small
              - _self_
              - /task@work: ???
            hydra: {searchpath: ["pkg://more.configs"]}
            data_path: ${oc.env:ABSENT_VARIABLE}/x
            trainer: {devices: 2, num_nodes: 4, precision: 16}
            """,
        "conf__net__small_yaml": "size: 1\n",
        "more__configs__net__large_yaml": "defaults: [sub/deep]\nsize: 2\nn_layers: 12\n",
        "more__configs__net__sub__deep_yaml": "# @package _global_\ngraph: {num_nodes: 2708}\n",
        "conf__task__push_yaml": "runner: {n_test: 50, n_train: 6}\n",
        "conf__task__reach_yaml": "runner: {n_test: 50}\n",
    }
    found, chosen = entry(tmp_path, HYDRA, **files)
    started = ("--config-name=full", "net=large", "split=train", "net.size=7", "trainer.devices=8")
    assert chosen.full == (*started, "data_path=made-up-data_path", "task@work=push")
    assert chosen.launched[-2:] == ("data_path=FILL_IN_DATA_PATH", "task@work=FILL_IN_TASK_WORK")
    smaller = ("trainer.devices=1", "trainer.num_nodes=1", "net.n_layers=2")
    assert set(chosen.small[len(chosen.full) :]) == set(smaller)  # a graph keeps its nodes
    assert set(chosen.single[len(chosen.full) :]) == set(smaller[:2])
    assert chosen.variables == (("ABSENT_VARIABLE", "made-up-absent_variable"),)
    config = find_config(tmp_path / "train.py", found, changes=["task@work=push"])
    assert config is not None
    assert config.leaves()["work.runner.n_test"] == 50
    # Whoever gives arguments says all but which configuration it is.
    _, given = entry(tmp_path, HYDRA, **files, arguments="task@work=reach net.size=3")
    assert given.full == ("--config-name=full", "task@work=reach", "net.size=3")
    assert set(given.small[3:]) == {
        *("trainer.devices=1", "trainer.num_nodes=1", "work.runner.n_test=1"),
    }
