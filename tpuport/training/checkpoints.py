"""Training states on disk: written atomically in the background, the last few kept."""

import importlib.util
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax

from tpuport.foundation.errors import CheckpointError, MissingExtraError, UsageError
from tpuport.foundation.files import is_full
from tpuport.training.state import TrainState

_STATE, _POSITION = "state", "position"
# The parts of a state that are dicts of arrays by fqn.
_BY_NAME = ("params", "frozen", "buffers", "ema")


class Restored(NamedTuple):
    """A restored training state and the position of the input.

    Attributes:
        state: the saved state, on the mesh of the state that was given.
        position: the position of the input that was given to `save`.
    """

    state: TrainState
    position: Any


class Checkpoints:
    """The training states of one run in a directory, written by orbax.

        with Checkpoints("runs/a", keep=3) as saved:
            state, position = saved.restore(step.init()) or (step.init(), None)
            ...
            saved.save(state, position)

    States are written atomically: orbax writes under a temporary name, so after a kill at
    any moment `restore` finds the last one that was completed.

    Args:
        directory: made if it is missing; the same on all processes.
        keep: the number of newest states to keep; None for all.
        asynchronous: write in the background. `save` returns once the state is copied off the
            devices, so the next step may overwrite it.

    Raises:
        MissingExtraError: orbax is not installed.
        UsageError: `keep` is less than 1.
    """

    def __init__(
        self, directory: str | Path, *, keep: int | None = 3, asynchronous: bool = True
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep}: expected how many states to keep, 1 or more, or None")
        if importlib.util.find_spec("orbax") is None:
            raise MissingExtraError("Checkpoints", "orbax-checkpoint", "train")
        import orbax.checkpoint as ocp

        self._ocp = ocp
        logging.getLogger("asyncio").addFilter(_is_no_echo)
        self.directory = Path(directory).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=asynchronous, create=True
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    @property
    def steps(self) -> list[int]:
        """Return the steps whose states are saved, in order."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, position: Any = None) -> None:
        """Save the state of its step. An existing state of that step is kept.

        Args:
            state: the state to save; the next step may overwrite it at once.
            position: position of the input to resume from: numbers, strings, lists, dicts.

        Raises:
            CheckpointError: an earlier write failed in the background, or this one does, or there
                are states of later steps.
            UsageError: the position would come back as something else.
        """
        ocp, number = self._ocp, int(state.step)
        _check_position(position)
        steps = self.steps
        if number in steps:
            return
        if steps and number < max(steps):
            raise CheckpointError(
                f"step {number} was not saved: {self.directory} has states up to step {max(steps)}."
                " What to do: give another directory, or delete the later states"
            )
        parts: dict[str, Any] = {_STATE: ocp.args.StandardSave(_as_tree(state))}
        if position is not None:
            parts[_POSITION] = ocp.args.JsonSave({"position": position})
        try:
            self._manager.check_for_errors()
            self._manager.save(number, args=ocp.args.Composite(**parts))
        except (OSError, ValueError, RuntimeError) as error:
            raise self._not_saved(error) from error

    def restore(self, like: TrainState, step: int | None = None) -> Restored | None:
        """Restore the last saved state, or that of a step; return None if there is none.

        Args:
            like: a state of the same model and optimizer, whose shardings the arrays get. Its mesh
                may differ from the one they were saved on, and abstract values will do.
            step: the step to restore; by default the last one.

        Raises:
            CheckpointError: it does not fit, or is damaged, or there is none of that step.
        """
        ocp, steps = self._ocp, self.steps
        number = step if step is not None else max(steps, default=None)
        if number is None:
            return None
        if number not in steps:
            raise CheckpointError(
                f"{self.directory} has no state of step {number}; there are {steps}"
            )
        parts: dict[str, Any] = {
            _STATE: ocp.args.StandardRestore(jax.tree.map(_struct, _as_tree(like)))
        }
        has_position = (self.directory / str(number) / _POSITION).exists()
        if has_position:
            parts[_POSITION] = ocp.args.JsonRestore()
        try:
            self._check_fits(like, number)
            found = self._manager.restore(number, args=ocp.args.Composite(**parts))
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            first = " ".join(str(error).split())[:300]
            raise CheckpointError(
                f"the state of step {number} in {self.directory} was not read: {first}. What to do:"
                " give a state of the model and optimizer that it was saved from, or another of"
                f" the steps {steps}"
            ) from error
        position = found[_POSITION]["position"] if has_position else None
        return Restored(TrainState(**found[_STATE]), position)

    def _check_fits(self, like: TrainState, number: int) -> None:
        """Raise `CheckpointError` if a state on disk has other parameters or buffers."""
        with self._ocp.StandardCheckpointer() as reader:
            there: Any = reader.metadata(self.directory / str(number) / _STATE)
        if there.item_metadata is None:
            raise ValueError("what says which arrays it has is damaged")
        tree = there.item_metadata.tree
        for part in _BY_NAME:
            found = {n: (tuple(v.shape), str(v.dtype)) for n, v in (tree[part] or {}).items()}
            wanted = {n: (v.shape, str(v.dtype)) for n, v in getattr(like, part).items()}
            for name in dict.fromkeys([*found, *wanted]):
                saved, given = found.get(name), wanted.get(name)
                if saved != given:
                    raise CheckpointError(
                        f"the state of step {number} in {self.directory} is of a different model:"
                        f" {part}[{name!r}] is {_shown(saved)} there and {_shown(given)} in the"
                        " state that was given. What to do: give a state of the model that it was"
                        " saved from"
                    )

    def wait(self) -> None:
        """Wait until what was saved is on the disk.

        Raises:
            CheckpointError: it is not.
        """
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._not_saved(error) from error

    def _not_saved(self, error: Exception) -> CheckpointError:
        """Return the error of a state that was not written; orbax does not say which one."""
        why = " ".join(str(error).split())[:300]
        remedy = "see that the directory is there and may be written to"
        if is_full(error):
            why, remedy = f"the disk is full ({why})", "make room there"
        return CheckpointError(
            f"a state was not saved to {self.directory}: {why}. The states of the steps"
            f" {self.steps} are there. What to do: {remedy}, and start again, which resumes after"
            " the last of them"
        )

    def close(self) -> None:
        """Wait for writes to finish, and end the threads that write."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Return whether a log record is not merely the echo of a failed write.

    orbax writes each array in a task and raises the error of one. For every other task asyncio logs
    a traceback at its collection: hundreds for a model, which bury the error.
    """
    return "async_serialize_from_host" not in record.getMessage()


def _check_position(position: Any) -> None:
    try:
        same = json.loads(json.dumps(position, allow_nan=False)) == position
    except (TypeError, ValueError):
        same = False
    if not same:
        raise UsageError(
            f"position: expected numbers, strings, lists and dicts with strings for keys, got"
            f" {position!r}"
        )


def _as_tree(state: TrainState) -> Mapping[str, Any]:
    """Return the parts of a state by name, which a later version of the class can read too."""
    return {name: getattr(state, name) for name in TrainState.__dataclass_fields__}


def _shown(kind: tuple[tuple[int, ...], str] | None) -> str:
    """Format a shape and dtype, such as `float32[16, 8]`."""
    return "missing" if kind is None else f"{kind[1]}{list(kind[0])}"


def _struct(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
