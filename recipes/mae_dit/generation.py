"""What the commands of stage 2 do, from a configuration to files."""

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tpuport
from recipes.hosts import refuse_several
from recipes.mae_dit import devices
from recipes.mae_dit.arrays import opened
from recipes.mae_dit.config import Config
from recipes.mae_dit.data import Pictures, batches, batches_of, crop_of, pictures, update_size
from recipes.mae_dit.evaluation.inception import Preparation, load_inception
from recipes.mae_dit.evaluation.measuring import Measures, Reference
from recipes.mae_dit.models import Autoencoder, make_stage2
from recipes.mae_dit.reconstructions import SHOWN
from recipes.mae_dit.runs import Given, latents, plain, trained_autoencoder
from recipes.mae_dit.sinks import make_sinks
from recipes.mae_dit.stage2 import training
from recipes.mae_dit.stage2.conditioning import check_labels
from recipes.mae_dit.stage2.latents import Cached, write_cache
from recipes.mae_dit.stage2.sampling import Sampler, sampling_of
from recipes.mae_dit.statistics import LatentStatistics, read_statistics
from recipes.mae_dit.watching import Distances, Grids, Watch, Watcher, write_grid
from recipes.mae_dit.weights import MODEL, load_run
from recipes.records import check_record, digest_of
from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_file
from tpuport.training import Batches

_ROWS = 512  # latents of a shard, at most
_WRITES = "which writes the files"


@dataclass(frozen=True)
class Sources:
    """What stage 2 takes from earlier commands.

    Attributes:
        stage1: Folder of a run of `stage1`; None if the configuration names weights.
        stats: File of `stats`, to normalise latents by.
        cache: Folder of `cache`; None to encode images while training.
    """

    stage1: Path | None = None
    stats: Path | None = None
    cache: Path | None = None

    def record(self, config: Config) -> dict[str, Any]:
        """Return what latents depend on, as JSON values."""
        arch = plain(asdict(config.arch))
        files = [] if self.stage1 is None else [self.stage1 / MODEL]
        return {
            "stage_1": arch["stage_1"],
            "connector": arch["connector"],
            "ckpt_path": arch["ckpt_path"],
            "transforms": config.dataset.transforms.type,
            "weights": digest_of(files) if files else None,
        }

    def statistics(self, config: Config) -> LatentStatistics | None:
        """Return the statistics that the configuration asks for."""
        if config.arch.do_normalize != (self.stats is not None):
            wanted = "true, so --stats FILE of the command stats is needed"
            unused = "false, so --stats would not be used. What to do: set it to true, or leave"
            text = wanted if self.stats is None else f"{unused} --stats out"
            raise UsageError(f"arch.do_normalize is {text}")
        return None if self.stats is None else read_statistics(self.stats)


@contextmanager
def _made(given: Given, sources: Sources) -> Iterator[tuple[Config, Autoencoder]]:
    """Yield the configuration and the frozen autoencoder with its weights."""
    with given.made() as (config, model):
        if sources.stage1 is not None:
            yield config, trained_autoencoder(model, sources.stage1)
            return
        arch = config.arch
        own = not arch.stage_1.target.startswith("rqvae.")
        if own and arch.ckpt_path is None and arch.stage_1.ckpt_path is None:
            raise UsageError(
                "stage 1 has random weights. What to do: give --stage1 RUN, the folder of a run of"
                " stage1, or arch.stage_1.ckpt_path"
            )
        yield config, model.eval()


def cache(
    given: Given, sources: Sources, out: Path, *, split: str = "train", workers: int = 0
) -> tuple[int, int]:
    """Write the latents of the images of a split, without random changes of images.

    Returns:
        The number of latents, and that of images that could not be read.
    """
    refuse_several("cache", _WRITES)
    with _made(given, sources) as (config, model):
        found = pictures(config, given.data, split, train=False)
        ported = tpuport.convert(model, methods=(latents,), verify=False)
        size = config.experiment.batch_size

        def encode(rows: range) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
            part = Pictures(found.entries[rows.start : rows.stop], found.crop)
            for batch in batches_of(part, size, workers=workers):
                zs = tpuport.to_numpy(ported.latents(batch["image"]))
                yield zs, batch["label"].numpy(), batch["valid"].numpy()

        rows = max(_ROWS // size, 1) * size
        record = {**sources.record(config), "split": split, "images": len(found), "rows": rows}
        return write_cache(out, len(found), rows, encode, record)


@dataclass(frozen=True)
class Looks:
    """What to look at while stage 2 trains.

    Attributes:
        grid_every: Updates between pictures in OUT/grids; None for none.
        evaluate_every: Updates between measures of samples; None for none.
        count: Samples that are measured.
        reference: Statistics that they are compared with; by default those of the training images,
            which are kept in OUT/reference.npz.
        inception: pytorch-fid's file; None for random weights.
        preparation: How images are resized for Inception.
    """

    grid_every: int | None = None
    evaluate_every: int | None = None
    count: int = 64
    reference: Path | None = None
    inception: Path | None = None
    preparation: Preparation = "pytorch"

    def watch(
        self,
        given: Given,
        config: Config,
        whole: training.Stage2,
        out: Path,
        last: int,
        workers: int,
        say: Callable[[str], Any],
    ) -> Watch:
        """Return what looks at the states of a run.

        Args:
            given: The configuration, and where images are.
            config: The configuration.
            whole: The modules with an autoencoder, to sample with.
            out: Folder of the run.
            last: The last update.
            workers: Processes that read images.
            say: Prints a line.
        """
        watchers: list[tuple[int, Watcher]] = []
        size = config.experiment.batch_size
        if self.grid_every is not None:
            watchers.append((self.grid_every, Grids(out / "grids", config.seed, size)))
        if self.evaluate_every is not None:
            distances = self._distances(given, config, out, workers, say)
            watchers.append((self.evaluate_every, distances))
        for every, _ in watchers:
            if every < 1:
                raise UsageError(f"{every} updates between looks: expected 1 or more")
        averaged = config.arch.ema_decay is not None
        return Watch(watchers, sampler_of(whole, config), averaged, last)

    def _distances(
        self,
        given: Given,
        config: Config,
        out: Path,
        workers: int,
        say: Callable[[str], Any],
    ) -> Distances:
        if self.count < 2:
            raise UsageError(f"count={self.count}: FID needs two samples or more")
        kept = out / "reference.npz" if self.reference is None else self.reference
        record: dict[str, Any] = {"count": self.count, "preparation": self.preparation}
        for name, path in (("inception", self.inception), ("reference", self.reference)):
            record[name] = None if path is None else digest_of([path])
        begun = (out / "fid.svg").is_file() or (self.reference is None and kept.is_file())
        what = "give what the run was evaluated with, or another --out"
        path = out / "evaluation.json"
        check_record(path, record, begun=begun, what_to_do=what, replace_unused=True)
        # Before the network is compiled, as a file that does not fit is found so.
        known = Reference.read(kept) if self.reference or kept.is_file() else None
        network = load_inception(self.inception, say=say, preparation=self.preparation)
        measures = Measures(network, None)
        if known is None:
            read = batches(config, given.data, split="train", workers=workers)
            features = measures.features((one["image"], one["valid"].numpy()) for one in read)
            say(f"statistics of {features.pool.count} images for training")
            features.write(kept)
            known = Reference.of(features)
        size = config.experiment.batch_size
        return Distances(measures, known, out, self.count, config.seed, size)


def train(
    given: Given,
    sources: Sources,
    out: Path,
    *,
    on: devices.Devices | None = None,
    limit: int | None = None,
    log: str = "json",
    log_every: int = 10,
    looks: Looks | None = None,
    workers: int = 0,
    say: Callable[[str], Any] = print,
) -> Path:
    """Train, or resume, and return the file of the model; see the command `stage2`."""
    looks, on, sinks = looks or Looks(), on or devices.Devices(), make_sinks(log, out)
    with _made(given, sources) as (config, autoencoder), ExitStack() as stack:
        statistics = sources.statistics(config)
        model = make_stage2(config, given.upstream)
        dataset = _dataset(config, given, sources)
        classes = getattr(getattr(model, "settings", model), "num_classes", None)
        if classes is not None:
            check_labels(training.as_labels(dataset), classes)
        read = stack.enter_context(_batches(config, dataset, workers))
        identity = {"config": plain(asdict(config)), "batches": len(read)}
        identity |= {"latents": sources.record(config), "cached": sources.cache is not None}
        identity["stats"] = None if sources.stats is None else digest_of([sources.stats])
        on.join({"configuration, images and latents": identity})
        seen = None if sources.cache is not None else autoencoder
        modules = training.Stage2(model, seen, statistics)
        step = training.make_step(modules, config, len(read), on.place)
        epochs = config.experiment.epochs * len(read)
        last = epochs if limit is None else min(limit, epochs)
        watch = None
        if looks.grid_every is not None or looks.evaluate_every is not None:
            refuse_several("looking at samples while it trains", "which draws and measures them")
            whole = training.Stage2(copy.deepcopy(model), autoencoder, statistics)
            watch = looks.watch(given, config, whole, out, last, workers, say)
        trained = training.train(
            step,
            read,
            out,
            config,
            identity=identity,
            limit=limit,
            log_every=log_every,
            evaluate=watch,
            evaluate_every=None if watch is None else watch.every,
            sinks=sinks,
        )
    devices.write(out / MODEL, trained.state_dict())
    return out / MODEL


def _dataset(config: Config, given: Given, sources: Sources) -> Any:
    """Return the images for training, or their cached latents.

    Raises:
        UsageError: The cache has latents of another stage 1.
    """
    if sources.cache is None:
        return pictures(config, given.data, "train", train=True)
    cached, own = Cached(sources.cache), sources.record(config)
    if differences := [name for name in own if cached.record.get(name) != own[name]]:
        raise UsageError(
            f"{sources.cache} has latents of another {differences[0]}:"
            f" {cached.record.get(differences[0])!r}, expected {own[differences[0]]!r}. What to do:"
            " run cache with this configuration and this --stage1, into another folder"
        )
    return cached


def _batches(config: Config, dataset: Any, workers: int) -> Batches:
    size = update_size(config)
    if len(dataset) < size:
        raise UsageError(
            f"{len(dataset)} samples are less than one batch of {size}. What to do: --set"
            f" experiment.actual_batch_size={len(dataset)}"
        )
    return Batches(dataset, batch_size=size, shuffle=True, seed=config.seed, workers=workers)


def sampler_of(modules: training.Stage2, config: Config, **how: Any) -> Sampler:
    """Return the sampler of a model; see `sampling_of`."""
    side = crop_of(config, train=False).size
    with torch.no_grad():
        zs = modules.latents({"image": torch.zeros(1, 3, side, side)})
    return Sampler(modules, sampling_of(modules.model, **how), tuple(zs.shape[1:]))


def sample(
    given: Given,
    sources: Sources,
    run: Path | None,
    out: Path,
    *,
    count: int,
    seed: int = 0,
    say: Callable[[str], Any] = print,
    **how: Any,
) -> None:
    """Write OUT/samples.npz in ADM's layout (arr_0 images, arr_1 labels), and OUT/grid.png.

    Batches are kept in OUT/parts until all are there, so that a run that was killed goes on.

    Args:
        given: The configuration.
        sources: What it was trained with.
        run: Folder of a run of `stage2`; None for the model before training.
        out: Folder to write to.
        count: Number of images, of classes in turn.
        seed: Random seed.
        say: Prints a line.
        how: See `sampling_of`.
    """
    if count < 1:
        raise UsageError(f"count={count}: expected 1 or more")
    refuse_several("sample", _WRITES)
    with _made(given, sources) as (config, autoencoder):
        model = make_stage2(config, given.upstream)
        if run is None:
            say("the model is untrained")
        else:
            load_run(model, run, "stage2")
        modules = training.Stage2(model, autoencoder, sources.statistics(config))
        size = min(config.experiment.batch_size, count)
        sampler = sampler_of(modules, config, **how)
        record = {"config": plain(asdict(config)), "latents": sources.record(config), "seed": seed}
        record["run"] = None if run is None else digest_of([run / MODEL])
        record["stats"] = None if sources.stats is None else digest_of([sources.stats])
        of = sampler.sampling
        record |= {"sampler": [of.sampler, of.steps, of.guidance], "batch_size": size}
        images = _sampled(sampler, out, count, seed, size, record)
    with replacing_file(out / "samples.npz") as temporary, temporary.open("wb") as file:
        np.savez(file, images, sampler.labels(0, count))
    write_grid(out / "grid.png", images[: SHOWN * 4])
    shutil.rmtree(out / "parts")


def _sampled(
    sampler: Sampler, out: Path, count: int, seed: int, size: int, record: dict[str, Any]
) -> np.ndarray:
    """Return samples, batch by batch, of which those in OUT/parts are not made again."""
    parts = out / "parts"
    begun = parts.is_dir() and any(parts.glob("*.npz"))
    what = "give the command that it was begun with, or another --out"
    check_record(out / "record.json", record, begun=begun, what_to_do=what, replace_unused=True)
    parts.mkdir(exist_ok=True)
    found = []
    for number in range(-(-count // size)):
        path = parts / f"{number:06d}.npz"
        if not path.is_file():
            with replacing_file(path) as temporary, temporary.open("wb") as file:
                np.savez(file, images=sampler.batch(number, seed, size))
        with opened(path, absent="", damaged="delete it, and run sample again") as file:
            found.append(file["images"])
    return np.concatenate(found)[:count]
