"""Device choice, process groups, and the one place that lets megatron-core run on a CPU.

megatron-core asks ``torch.cuda`` for its current device, its random state and a few literal "cuda" tensors.
On a machine without a GPU, :func:`start` answers those questions with the CPU; nothing else in eeplan knows
the difference. With a GPU nothing is patched.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import datetime
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""glibc's mallopt parameters (malloc.h)."""


@dataclass(frozen=True, slots=True)
class Backend:
    """This process's device and its place in the (tensor, data, pipeline) grid."""

    device: torch.device
    rank: int
    world_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int

    @property
    def is_cuda(self) -> bool:
        """Whether tensors live on a GPU."""
        return self.device.type == "cuda"


def start(
    *,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    embedding_ranks: Callable[[Sequence[int]], list[int]] | None = None,
    timeout_s: float = 600.0,
) -> Backend:
    """Join the process group that torchrun announced and build megatron-core's parallel groups.

    Without torchrun's environment a group of one process is made, so that a single-process tool needs no
    launcher.

    Args:
        embedding_ranks: picks, from the ranks of one pipeline, those that hold a copy of the tied vocabulary
            matrix; megatron-core then keeps the copies equal.
        timeout_s: how long a collective may wait for a rank before it fails.
    """
    use_cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if use_cuda:
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
        _answer_cuda_with_cpu()
        keep_freed_memory()
    if not dist.is_initialized():
        _init_process_group("nccl" if use_cuda else "gloo", timeout_s)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_model_parallel_size,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
            get_embedding_ranks=embedding_ranks,
        )
        megatron_random.model_parallel_cuda_manual_seed(1234)
    return Backend(
        device=device,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
    )


def stop() -> None:
    """Leave the process group; safe to call twice."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def cuda_names_on_cpu(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Where megatron-core writes "cuda" literally (optimizers, gradient clipping): answer with the CPU.

    A torch function mode taxes every torch call, so keep it around such calls only. No-op on a GPU.
    """
    return contextlib.nullcontext() if device.type == "cuda" else _CudaNamesOnCpu()


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed blocks instead of returning them to the kernel.

    Activations are freed and allocated again every microbatch; giving their pages back costs a page fault for
    each 4 KiB of the next one, and makes op times depend on history.

    Returns:
        Whether the C library accepted it (False outside Linux with glibc).
    """
    name = ctypes.util.find_library("c")
    if not sys.platform.startswith("linux") or name is None:
        return False
    mallopt = getattr(ctypes.CDLL(name), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def software() -> dict[str, str]:
    """Versions that measured numbers depend on."""
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "megatron_core": str(megatron.core.__version__),
    }


def _init_process_group(backend: str, timeout_s: float) -> None:
    timeout = datetime.timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
        return
    dist.init_process_group(
        backend, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timeout
    )


def _answer_cuda_with_cpu() -> None:
    """Replace the handful of torch.cuda functions that megatron-core calls outside literals."""

    def current_device() -> str:
        return "cpu"

    def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    def synchronize(*_: Any) -> None:
        """CPU ops have finished when they return."""

    cuda: Any = torch.cuda
    cuda.current_device = current_device
    cuda.synchronize = synchronize
    cuda.get_rng_state = get_rng_state
    cuda.manual_seed = manual_seed
    # Its tracker swaps the GPU's random state and watches that the CPU's stays put; here they are the same.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    tracker: Any = megatron_random
    tracker._get_cuda_rng_state = get_rng_state
    tracker._set_cuda_rng_state = set_rng_state


class _CudaNamesOnCpu(TorchFunctionMode):
    """Rewrites device "cuda" to "cpu", and lets CPU tensors answer ``type()`` with their CUDA name."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


@contextlib.contextmanager
def single_process() -> Iterator[Backend]:
    """A backend of one process for tools that need a model but no launcher; left on exit."""
    backend = start()
    try:
        yield backend
    finally:
        stop()
