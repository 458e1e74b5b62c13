"""What a checkpoint holds: parameters and optimizer state under names that no split changes, and positions.

Names: a parameter's global name; ``optimizer.exp_avg.<name>`` and ``optimizer.exp_avg_sq.<name>`` for Adam's
moments; ``optimizer.master.<name>`` for the fp32 copy of a 16-bit parameter. Tensor-parallel shares are put
together before they are written and cut when they are read, so the same file serves any layout.

The vocabulary is padded to a multiple of the tensor-parallel size. Where another size pads differently, the
rows of real tokens are the same and surplus rows of padding are dropped or keep their fresh values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from eeplan.errors import CheckpointError
from eeplan.runtime.backend import Backend
from eeplan.runtime.model import EarlyExitGPT
from eeplan.runtime.optimizer import Training
from eeplan.runtime.sharding import gather_whole, share_of, whole_shape


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands after ``iteration`` iterations, besides its tensors."""

    iteration: int
    consumed_samples: int
    """Of the training data, by all data-parallel ranks together."""
    learning_rate_steps: int
    """Samples by which the learning-rate schedule has advanced."""
    optimizer_steps: int
    """Updates that Adam's bias correction has counted."""
    loss_weights: dict[str, float]
    """Of the next iteration, by head."""
    loss_scaling: dict[str, float] | None = None
    """Loss scale of the next iteration and what moves it (fp16)."""

    def to_json(self) -> dict[str, Any]:
        """As stored in the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Position:
        """Inverse of :meth:`to_json`."""
        return cls(**document)


def named_state(model: EarlyExitGPT, training: Training | None) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Every tensor to keep as (name, parameter's global name, tensor, parameter).

    Without ``training`` parameters only. With the distributed optimizer its state is a copy, and going
    through it is collective over data-parallel ranks.
    """
    for name, parameter in model.named_global_parameters():
        yield name, name, parameter.detach(), parameter
        if training is None:
            continue
        for part in training.state.keys(parameter):
            state = training.state.read(parameter, part).detach()
            yield f"optimizer.{part}.{name}", name, state, parameter


def whole_state(model: EarlyExitGPT, training: Training | None) -> dict[str, Tensor]:
    """Every tensor whole, by name; collective over tensor-parallel ranks."""
    with torch.no_grad():
        return {
            key: gather_whole(tensor, name, parameter)
            for key, name, tensor, parameter in named_state(model, training)
        }


def load_tensors(folder: Path, model: EarlyExitGPT, training: Training | None) -> None:
    """Fill this rank's parameters, and with ``training`` its optimizer state, from a verified checkpoint.

    Nothing is changed unless all of it fits.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or kind of number.
    """
    # First, as ranks may have to meet for it: one that cannot read must not be waited for.
    wanted = list(named_state(model, training))
    reader = dcp.FileSystemReader(folder)
    try:
        stored = reader.read_metadata().state_dict_metadata
        state: dict[str, Any] = {}
        for key, _, tensor, parameter in wanted:
            saved: Any = stored.get(key)
            if saved is None:
                raise ValueError(f"it has no {key}")
            shape, needed = list(saved.size), whole_shape(parameter)
            if shape[1:] != needed[1:] or (shape[0] != needed[0] and not _is_vocabulary(key)):
                raise ValueError(f"{key} has shape {shape}, the plan's is {needed}")
            if saved.properties.dtype != tensor.dtype:
                raise ValueError(f"{key} is {saved.properties.dtype}, the plan's is {tensor.dtype}")
            state[key] = torch.empty(shape, dtype=tensor.dtype)
        with warnings.catch_warnings():
            # Each rank reads for itself; torch need not point it out.
            warnings.filterwarnings("ignore", message=r"torch\.distributed is (disabled|unavailable)")
            dcp.load(state, storage_reader=reader, no_dist=True)
    except (OSError, RuntimeError, ValueError, KeyError, dcp.CheckpointException) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"checkpoint {folder} does not fit its plan: {first_line}") from None
    with torch.no_grad():
        for key, name, tensor, parameter in wanted:
            whole = state.pop(key)
            rows, needed_rows = whole.shape[0], whole_shape(parameter)[0]
            if rows < needed_rows:
                fresh = gather_whole(tensor, name, parameter)
                whole = torch.cat([whole, fresh[rows:].cpu()])
            tensor.copy_(share_of(whole[:needed_rows], name, parameter))
            if training is not None and key.startswith("optimizer."):
                training.state.write(parameter, key.split(".")[1], tensor)


def _is_vocabulary(key: str) -> bool:
    return key.endswith(("word_embeddings.weight", "output_layer.weight"))


def random_state() -> dict[str, Any]:
    """This rank's random generators."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Inverse of :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def place_of(backend: Backend) -> str:
    """Names a rank's place in the layout, sizes included: random states belong to such a place."""
    return (
        f"p{backend.pipeline_rank}/{backend.pipeline_size} t{backend.tensor_rank}/{backend.tensor_size} "
        f"d{backend.data_rank}/{backend.data_size}"
    )


def gather_random_states(backend: Backend) -> dict[str, Any] | None:
    """The random states of all ranks by place, on rank 0; collective."""
    gathered: list[Any] | None = [None] * backend.world_size if backend.rank == 0 else None
    dist.gather_object((place_of(backend), random_state()), gathered, dst=0)
    return None if gathered is None else dict(gathered)
