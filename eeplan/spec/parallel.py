"""Parallel layout: stages, tensor and data parallelism, and the split of the layers."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Discriminator, PositiveInt, Tag, model_validator

from eeplan.schema import Model


def _known_split(value: object) -> object:
    if value not in ("uniform", "auto"):
        raise ValueError(
            f"{value!r} is no layer split; expected uniform, auto or layers per stage as in [3, 5]"
        )
    return value


LayerSplit = Annotated[
    # Tags in brackets are not taken for keys in error messages.
    Annotated[Literal["uniform", "auto"], BeforeValidator(_known_split), Tag("[word]")]
    | Annotated[tuple[PositiveInt, ...], Tag("[layers]")],
    Discriminator(lambda value: "[layers]" if isinstance(value, list | tuple) else "[word]"),
]


class ParallelSpec(Model):
    """Parallel layout. World size is the product of the three degrees."""

    pipeline_model_parallel_size: PositiveInt = 1
    tensor_model_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    layer_split: LayerSplit = "uniform"
    """Layers of each pipeline stage; ``auto`` lets the planner choose. Embedding and final head count as none
    (Megatron's pipeline_model_parallel_layout)."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks also divide the sequence where a layer is not tensor-parallel (norms, residuals,
    messages between stages)."""
    use_distributed_optimizer: bool = False
    """Data-parallel ranks divide the optimizer's state: gradients are reduce-scattered, parameters
    all-gathered."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks while the last microbatch's backward still runs."""
    p2p_communication: Literal["asynchronous", "rendezvous"] = "asynchronous"
    """How stages send messages. ``asynchronous``: as eeplan's executor does; ``rendezvous``: a sender waits
    for its receiver, in Megatron's order of sends and receives (predicted only)."""
    gpus_per_node: PositiveInt | None = None
    """Processes that share a node's links; None: all links are alike. Ranks are numbered as in Megatron:
    tensor-parallel innermost, then data-parallel, then pipeline."""

    @model_validator(mode="after")
    def _node_holds_tensor_parallel_ranks(self) -> Self:
        tp, per_node = self.tensor_model_parallel_size, self.gpus_per_node
        if per_node is not None and per_node % tp:
            raise ValueError(
                f"gpus_per_node {per_node} is not divisible by tensor_model_parallel_size {tp}; its ranks "
                "must share a node"
            )
        return self

    @property
    def num_nodes(self) -> int:
        """Nodes that the run needs; 1 where nodes are not told apart."""
        return 1 if self.gpus_per_node is None else -(-self.world_size // self.gpus_per_node)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pipeline_model_parallel_size * self.tensor_model_parallel_size * self.data_parallel_size
