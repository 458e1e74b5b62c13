"""Two processes prove that they can exchange tensors. ``eeplan doctor`` runs this; see :func:`main`."""

from __future__ import annotations

from eeplan.runtime.launch import die_with_parent


def main() -> None:
    """Sum over both ranks, then a message each way; prints the back-end that did it.

    Raises:
        RuntimeError: a number arrived wrong.
    """
    die_with_parent()
    import torch
    import torch.distributed as dist

    backend = "nccl" if torch.cuda.device_count() >= 2 else "gloo"
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    total = torch.tensor([float(rank + 1)], device=device)
    dist.all_reduce(total)
    received = torch.zeros(1, device=device)
    outgoing = torch.tensor([float(rank)], device=device)
    requests = [dist.isend(outgoing, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    for request in filter(None, requests):
        request.wait()
    if total.item() != size * (size + 1) / 2 or received.item() != (rank - 1) % size:
        raise RuntimeError(f"{backend} moved wrong numbers: sum {total.item()}, message {received.item()}")
    dist.destroy_process_group()
    if rank == 0:
        print(f"backend {backend}", flush=True)


if __name__ == "__main__":
    main()
