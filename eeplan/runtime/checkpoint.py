"""Checkpoints: whole or absent, verified before use, loadable on any split.

A checkpoint is a folder ``iter_0000060`` with the plan, the tokenizer, the random generators' states, the
tensors of ``checkpoint_state`` in torch.distributed.checkpoint's format, and a manifest with checksums, the
plan's hash and the run's position. How it gets to disk is ``checkpoint_files``; going on from one is
``resume``.
"""

from __future__ import annotations

import errno
import io
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from eeplan.errors import CheckpointError, FileError
from eeplan.plan import Plan, load_plan, write_plan
from eeplan.runtime.backend import Backend
from eeplan.runtime.checkpoint_files import (
    LATEST,
    MANIFEST,
    FileOperations,
    checkpoints_in,
    clear_leftovers,
    commit,
    folder_name,
    partial_folder,
    verify,
)
from eeplan.runtime.checkpoint_state import (
    Position,
    gather_random_states,
    load_tensors,
    whole_state,
)
from eeplan.runtime.model import EarlyExitGPT, build_model, whole_model_spec
from eeplan.runtime.optimizer import Training
from eeplan.runtime.plan_identity import training_hash

PLAN, TOKENIZER, RANDOM = "plan.yaml", "tokenizer.json", "random.pt"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint will hold, as seen by one rank."""

    iteration: int
    """Iterations done."""
    plan: Plan
    tensors: dict[str, Tensor]
    """Whole, by name."""
    random_states: dict[str, Any] | None
    position: Position | None


def snapshot(
    iteration: int,
    model: EarlyExitGPT,
    plan: Plan,
    *,
    training: Training | None = None,
    position: Position | None = None,
    backend: Backend | None = None,
    copies: bool = False,
) -> Snapshot:
    """Take stock of a model; collective over all ranks.

    Args:
        training: with ``position`` and ``backend``, makes a checkpoint that training can go on from; without
            it holds the model alone.
        copies: of all tensors in the CPU's memory, so that training may go on before they are written.
    """
    tensors = whole_state(model, training)
    if copies:
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    random_states = gather_random_states(backend) if backend else None
    return Snapshot(iteration, plan, tensors, random_states, position)


def write(
    folder: Path, taken: Snapshot, *, operations: FileOperations | None = None, group: Any = None
) -> Path:
    """Write a checkpoint below ``folder``; collective over all ranks.

    Args:
        folder: the run's ``checkpoints`` folder; its ``latest`` file is moved on afterwards, and all but the
            newest ``keep_checkpoints`` of the plan's run are removed.
        group: process group of all ranks to agree in; None is the default one.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on every rank, if any rank cannot write (disk full, no permission). What was there
            before is then still there.
    """
    operations = operations or FileOperations()
    plan, iteration = taken.plan, taken.iteration
    partial = partial_folder(folder, iteration)
    try:
        _on_first_rank(lambda: _prepare(folder, partial, operations), group)
        writer = operations.tensor_writer(partial)
        try:
            dcp.save(dict(taken.tensors), storage_writer=writer, process_group=group)
        except dcp.CheckpointException as error:
            # Raised on all ranks, so they can say to each other what went wrong.
            raise _of_the_disk(writer.problems, group) or error from None
        facts = {
            "iteration": iteration,
            "plan_sha256": plan.content_sha256,
            "training_sha256": training_hash(plan),
            "position": taken.position.to_json() if taken.position else None,
        }

        def finish() -> None:
            _add_small_files(partial, plan, taken.random_states, operations)
            commit(folder, iteration, facts, operations, plan.run.training.keep_checkpoints)

        _on_first_rank(finish, group)
    except OSError as error:
        if dist.get_rank() == 0:
            _remove_quietly(partial)
        kept = checkpoints_in(folder)
        remains = f"the last one is {kept[0].name}" if kept else "there is none yet"
        raise CheckpointError(
            f"checkpoint {folder / folder_name(iteration)} cannot be written "
            f"({error.strerror or error}); {remains}; make room or permission there and start again"
        ) from None
    return folder / folder_name(iteration)


def save(
    folder: Path,
    iteration: int,
    model: EarlyExitGPT,
    plan: Plan,
    *,
    training: Training | None = None,
    position: Position | None = None,
    backend: Backend | None = None,
    operations: FileOperations | None = None,
) -> Path:
    """:func:`snapshot` and :func:`write` in one go; collective over all ranks."""
    taken = snapshot(iteration, model, plan, training=training, position=position, backend=backend)
    return write(folder, taken, operations=operations)


def resolve(path: Path) -> Path:
    """The checkpoint folder that ``path`` means: itself, or the latest below a run or ``checkpoints`` folder.

    Raises:
        CheckpointError: nothing of the kind is there.
    """
    if not path.exists():
        raise CheckpointError(f"checkpoint {path} does not exist; give the folder that `eeplan train` wrote")
    for folder in (path, path / "checkpoints"):
        if (folder / LATEST).is_file():
            name = (folder / LATEST).read_text(errors="replace").strip()
            if name != Path(name).name or not (folder / name).is_dir():
                raise CheckpointError(
                    f"{folder / LATEST} points to '{name}', which is not there; give another folder"
                )
            return folder / name
    if (path / MANIFEST).is_file():
        return path
    raise CheckpointError(
        f"{path} is no checkpoint: expected a {MANIFEST} in it, or a '{LATEST}' file of a finished run; "
        "give the folder that `eeplan train` wrote"
    )


def usable(path: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """The newest valid checkpoint that ``path`` means; a checkpoint named itself has no substitute.

    Returns:
        Folder, its manifest, and a line for each newer one that is damaged.

    Raises:
        CheckpointError: there is none.
    """
    newest = resolve(path)
    if newest == path:
        return newest, verify(newest), []
    damaged: list[str] = []
    older = [folder for folder in checkpoints_in(newest.parent) if folder.name < newest.name]
    for folder in (newest, *older):
        try:
            return folder, verify(folder), damaged
        except CheckpointError as error:
            damaged.append(f"{str(error).split('; use ')[0]}; an older one is used")
    raise CheckpointError(
        f"no checkpoint in {newest.parent} is valid: {damaged[0].split(';')[0]}; train again"
    )


def load_model(path: Path, backend: Backend) -> tuple[EarlyExitGPT, Plan]:
    """The whole model of a checkpoint on one process, and the plan it was trained by.

    Where ``path`` is a run and its newest checkpoint is damaged, the one before is used, and stderr says so.

    Raises:
        CheckpointError: missing, damaged, or not of its own plan.
    """
    folder, manifest, notes = usable(path)
    for note in notes:
        print(f"eeplan: {note}", file=sys.stderr)
    plan = load_plan(folder / PLAN)
    if plan.content_sha256 != manifest["plan_sha256"]:
        raise CheckpointError(f"checkpoint {folder} was not written by the {PLAN} in it; use another")
    run = plan.run.model_copy(update={"parallel": type(plan.run.parallel)()})
    model = build_model(run, whole_model_spec(plan), backend)
    load_tensors(folder, model, None)
    return model, plan


def load_tokenizer_path(path: Path) -> Path:
    """The tokenizer file inside the checkpoint that :func:`load_model` takes."""
    return usable(path)[0] / TOKENIZER


def _prepare(folder: Path, partial: Path, operations: FileOperations) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder, operations)
    if partial.exists():
        raise OSError(errno.ENOTEMPTY, "what an earlier save left cannot be removed", str(partial))
    operations.make_folder(partial)


def _add_small_files(
    partial: Path, plan: Plan, random_states: dict[str, Any] | None, operations: FileOperations
) -> None:
    if random_states is not None:
        buffer = io.BytesIO()
        torch.save(random_states, buffer)
        operations.write(partial / RANDOM, buffer.getvalue())
    operations.write(partial / TOKENIZER, Path(plan.run.data.tokenizer).read_bytes())
    operations.before("write", partial / PLAN)
    write_plan(partial / PLAN, plan)


def _on_first_rank(work: Callable[[], None], group: Any) -> None:
    """Run ``work`` on rank 0 while the others wait; an error of the disk there is raised on all."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as error:
            outcome[0] = (error.errno, error.strerror or str(error))
        except FileError as error:
            outcome[0] = (errno.EIO, str(error))
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[0] is not None:
        raise OSError(*outcome[0])


def _of_the_disk(problems: list[OSError], group: Any) -> OSError | None:
    """The first error that the disk of any rank reported; collective."""
    mine = (problems[0].errno, problems[0].strerror or str(problems[0])) if problems else None
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine, group=group)
    return next((OSError(*problem) for problem in gathered if problem is not None), None)


def _remove_quietly(partial: Path) -> None:
    """Give the space back; the error that is about to be told matters more than one here."""
    shutil.rmtree(partial, ignore_errors=True)
