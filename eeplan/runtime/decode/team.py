"""Tensor parallelism inside a decoding stage: its processes hold shares of every matrix and add up.

Attention is cut by key/value head, the MLP by channel, the vocabulary by token (Megatron-LM, Shoeybi et al.
2019, 3). After each cut product the first process adds the shares in order of rank and sends the sum back, so
all of them go on with the same bits and come to the same decisions; only the first one speaks of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eeplan.errors import DecodeError
from eeplan.runtime.decode.channel import Channel
from eeplan.spec import RunSpec


class Team:
    """The processes of one stage.

    Args:
        rank: of this process.
        size: of the team.
        channels: of rank 0 to all others in order of rank; of the others, to rank 0.
    """

    def __init__(self, rank: int = 0, size: int = 1, channels: Sequence[Channel] = ()) -> None:
        assert len(channels) == (size - 1 if rank == 0 else 1), "every other process has a channel"
        self.rank, self.size = rank, size
        self._channels = tuple(channels)

    def total(self, share: Tensor) -> Tensor:
        """The sum of all processes' shares."""
        if self.size == 1:
            return share
        if self.rank:
            self._channels[0].send(to_bytes(share))
            return from_bytes(self._channels[0].receive(), share)
        whole = share
        for channel in self._channels:
            whole = whole + from_bytes(channel.receive(), share)
        self.tell(to_bytes(whole))
        return whole

    def tell(self, message: object) -> None:
        """From rank 0 to all others."""
        for channel in self._channels:
            channel.send(message)

    def share(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This process's part of a matrix, cut evenly."""
        return whole if self.size == 1 else whole.chunk(self.size, dim=dim)[self.rank].contiguous()

    def gated_share(self, whole: Tensor) -> Tensor:
        """Of a matrix whose rows are gates, then what they gate."""
        if self.size == 1:
            return whole
        return torch.cat([self.share(half) for half in whole.chunk(2)])

    def tokens(self, vocab_size: int) -> range:
        """Tokens whose logits this process computes."""
        each = -(-vocab_size // self.size)
        return range(min(vocab_size, self.rank * each), min(vocab_size, (self.rank + 1) * each))


ALONE = Team()
"""A stage of one process."""


def check_team(run: RunSpec, size: int) -> None:
    """Refuse a number of processes that cannot share a stage.

    Raises:
        DecodeError: heads or channels cannot be cut so.
    """
    if size < 1 or run.model.query_groups % size or run.model.ffn_size % size:
        raise DecodeError(
            f"tensor size is {size}; expected a divisor of the {run.model.query_groups} key/value heads and "
            f"of the {run.model.ffn_size} MLP channels"
        )


def to_bytes(tensor: Tensor) -> bytes:
    """A tensor's numbers as they are in memory."""
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes | bytearray, like: Tensor) -> Tensor:
    """Inverse of :func:`to_bytes` for a tensor of a known shape and kind."""
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape).to(like.device)
