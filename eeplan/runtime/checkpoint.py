"""Model checkpoints: whole or absent, verified before use, loadable on any split.

A checkpoint is a folder ``iter_0000060`` with the plan, the tokenizer, the parameters in
torch.distributed.checkpoint's format under names that do not depend on the split, and a manifest of
checksums. It is written under another name and renamed when complete. Optimizer state is not part of it yet.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from eeplan.errors import CheckpointError
from eeplan.files import write_text
from eeplan.plan import Plan, load_plan, write_plan
from eeplan.runtime.backend import Backend
from eeplan.runtime.model import EarlyExitGPT, build_model, whole_model_spec
from eeplan.runtime.sharding import gather_whole

MANIFEST, LATEST, PLAN, TOKENIZER = "manifest.json", "latest", "plan.yaml", "tokenizer.json"
_FORMAT = 1


def save(folder: Path, iteration: int, model: EarlyExitGPT, plan: Plan) -> Path:
    """Write a checkpoint below ``folder``; collective over all ranks.

    Args:
        folder: the run's ``checkpoints`` folder; its ``latest`` file is moved on afterwards.
        iteration: iterations done.

    Returns:
        The checkpoint's folder.
    """
    final = folder / f"iter_{iteration:07d}"
    partial = folder / f".{final.name}.partial"
    is_first_rank = dist.get_rank() == 0
    if is_first_rank:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(_whole_state(model), storage_writer=dcp.FileSystemWriter(partial, thread_count=1))
    dist.barrier()
    if is_first_rank:
        write_plan(partial / PLAN, plan)
        shutil.copyfile(plan.run.data.tokenizer, partial / TOKENIZER)
        manifest = {
            "format": _FORMAT,
            "iteration": iteration,
            "plan_sha256": plan.content_sha256,
            "files": {path.name: _sha256(path) for path in sorted(partial.iterdir())},
        }
        write_text(partial / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        write_text(folder / LATEST, final.name + "\n")
    dist.barrier()
    return final


def resolve(path: Path) -> Path:
    """The checkpoint folder that ``path`` means: itself, or the latest below a run or ``checkpoints`` folder.

    Raises:
        CheckpointError: nothing of the kind is there.
    """
    if not path.exists():
        raise CheckpointError(f"checkpoint {path} does not exist; give the folder that `eeplan train` wrote")
    for folder in (path, path / "checkpoints"):
        if (folder / LATEST).is_file():
            name = (folder / LATEST).read_text().strip()
            if not (folder / name).is_dir():
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


def verify(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint folder against its manifest.

    Returns:
        The manifest.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        files: dict[str, str] = manifest["files"]
        if manifest["format"] != _FORMAT:
            raise CheckpointError(
                f"checkpoint {path} has format {manifest['format']}, this eeplan reads {_FORMAT}; "
                "use the version that wrote it"
            )
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is missing or damaged; use another") from None
    for name, expected in files.items():
        if not (path / name).is_file():
            raise CheckpointError(f"checkpoint {path}: {name} is missing; use another checkpoint")
        if _sha256(path / name) != expected:
            raise CheckpointError(
                f"checkpoint {path}: {name} is damaged (checksum differs); use another checkpoint"
            )
    return manifest


def load_model(path: Path, backend: Backend) -> tuple[EarlyExitGPT, Plan]:
    """The whole model of a checkpoint on one process, and the plan it was trained by.

    Raises:
        CheckpointError: missing, damaged, or not of its own plan.
    """
    folder = resolve(path)
    manifest = verify(folder)
    plan = load_plan(folder / PLAN)
    if plan.content_sha256 != manifest["plan_sha256"]:
        raise CheckpointError(f"checkpoint {folder} was not written by the {PLAN} in it; use another")
    run = plan.run.model_copy(update={"parallel": type(plan.run.parallel)()})
    model = build_model(run, whole_model_spec(plan), backend)
    state: dict[str, Any] = {name: p.detach() for name, p in model.named_global_parameters()}
    try:
        with warnings.catch_warnings():
            # A single process is what is meant here, so torch need not point it out.
            warnings.filterwarnings("ignore", message=r"torch\.distributed is (disabled|unavailable)")
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    except (RuntimeError, ValueError, KeyError, dcp.CheckpointException) as error:
        first_line = str(error).strip().splitlines()[0]
        raise CheckpointError(f"checkpoint {folder} does not fit its plan: {first_line}") from None
    return model, plan


def load_tokenizer_path(path: Path) -> Path:
    """The tokenizer file inside a checkpoint."""
    return resolve(path) / TOKENIZER


def _whole_state(model: EarlyExitGPT) -> dict[str, Tensor]:
    """Parameters by split-independent name; each tied copy and each share's whole appears on its ranks."""
    with torch.no_grad():
        return {
            name: gather_whole(parameter.detach(), name, parameter)
            for name, parameter in model.named_global_parameters()
        }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
