"""What must hold before ranks are started: found out in the parent, in a second, with nothing written.

Imports neither torch nor megatron-core.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from eeplan.console import Progress, follow_training
from eeplan.errors import FileError, LaunchError, PlanError, SchemaError
from eeplan.files import require_writable_folder
from eeplan.plan import Plan, load_plan
from eeplan.runtime.dataset_files import check_data
from eeplan.runtime.launch import launch
from eeplan.runtime.plan_identity import training_hash


def require_runtime() -> None:
    """Refuse to start without torch and megatron-core.

    Raises:
        LaunchError: names what is missing and how to install it.
    """
    for module, name in (("torch", "torch"), ("megatron", "megatron-core")):
        if importlib.util.find_spec(module) is None:
            raise LaunchError(f"{name} is not installed; install the extra: pip install 'eeplan[runtime]'")


def require_wandb(plan: Plan) -> None:
    """Refuse to start without wandb where the plan logs there.

    Raises:
        LaunchError: it is not installed.
    """
    if plan.run.training.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise LaunchError(
            "training.wandb_project is set, but wandb is not installed; run pip install wandb, or leave the "
            "key out"
        )


def require_asynchronous(plan: Plan) -> None:
    """Refuse a plan that was judged with messages that the executor does not send.

    Raises:
        PlanError.
    """
    if plan.run.parallel.p2p_communication != "asynchronous":
        raise PlanError(
            f"parallel.p2p_communication is {plan.run.parallel.p2p_communication}, which eeplan predicts but "
            "does not run: its stages send asynchronously; set it to asynchronous and plan again"
        )


def check_training(plan_path: Path, out: Path, nproc: int | None = None) -> Plan:
    """Everything about a training job that can be wrong before it starts.

    Args:
        plan_path: plan file.
        out: run directory to be; may exist if it belongs to the same plan.
        nproc: ranks the user asked for; None accepts the plan's number.

    Returns:
        The plan, with absolute data paths.

    Raises:
        FileError, SchemaError, PlanError, DataError, LaunchError.
    """
    plan = load_plan(plan_path)
    require_asynchronous(plan)
    if nproc is not None and nproc != plan.run.parallel.world_size:
        raise LaunchError(f"--nproc is {nproc}; {_processes(plan)}; leave --nproc out")
    check_data(plan.run)
    require_folder_for(plan, out)
    require_runtime()
    require_wandb(plan)
    return plan


def check_ranks(plan: Plan, environment: Mapping[str, str]) -> None:
    """Whether this process is one of as many as the plan needs, by what torchrun says.

    Raises:
        LaunchError: it is not. PlanError: no process can run the plan.
    """
    require_asynchronous(plan)
    started = environment.get("WORLD_SIZE")
    if started is None:
        raise LaunchError(
            "this is a worker of torchrun, which has not started it; run eeplan train, or torchrun … -m "
            "eeplan.runtime.train"
        )
    if started != str(plan.run.parallel.world_size):
        raise LaunchError(
            f"torchrun started {started} processes on all nodes together; {_processes(plan)}; set "
            "--nnodes and --nproc-per-node accordingly"
        )


def _processes(plan: Plan) -> str:
    parallel = plan.run.parallel
    return (
        f"the plan needs {parallel.world_size} processes (pipeline {parallel.pipeline_model_parallel_size} x "
        f"tensor {parallel.tensor_model_parallel_size} x data {parallel.data_parallel_size})"
    )


def require_folder_for(plan: Plan, out: Path) -> None:
    """Refuse a run directory that cannot be written, or that holds the run of another plan.

    A plan that differs in its parallel layout only may go on there.

    Raises:
        FileError, PlanError.
    """
    require_writable_folder(out, "run directory")
    copy = out / "plan.yaml"
    if not copy.exists():
        return
    try:
        other = load_plan(copy)
    except (FileError, SchemaError, PlanError) as error:
        raise PlanError(f"run directory {out} is damaged: {error}") from None
    if training_hash(other) != training_hash(plan):
        raise PlanError(
            f"run directory {out} holds the run of another plan (its plan.yaml has content_sha256 "
            f"{other.content_sha256[:12]}…, this plan {plan.content_sha256[:12]}…); choose another --out"
        )


def run_ranks(plan_path: Path, plan: Plan, out: Path, progress: Progress, *, restart: bool = False) -> None:
    """Train a plan that :func:`check_training` has passed; returns when all ranks have finished.

    Args:
        restart: begin anew where ``out`` holds checkpoints, instead of going on from the newest.

    Raises:
        EeplanError: an error that a rank reported. LaunchError: a rank died. Preempted: all ranks saved and
        ended after a SIGTERM or SIGUSR1 to this process or any of them.
    """
    launch(
        "eeplan.runtime.train",
        [str(plan_path), "--out", str(out), *(["--restart"] if restart else [])],
        nproc=plan.run.parallel.world_size,
        log=out / "train.log",
        on_line=follow_training(progress),
        saves_when_stopped=True,
    )
