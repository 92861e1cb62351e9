"""One message from rank to rank: our transport, and bare gloo.

Two processes of one host send a tensor to and fro. Printed: microseconds one way (half a round
trip) and the processor time that a message costs one process, threads included.

    python benchmarks/transports.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_gpp.runtime.payload import pack
from lightning_gpp.runtime.transport.process_transport import ProcessTransport
from lightning_gpp.runtime.transport.transport import Transport

SIZES_BYTES = (64, 8 << 10, 96 << 10, 1 << 20, 16 << 20)
ROUNDS = 300


def bare_gloo(rank: int, tensor: torch.Tensor) -> None:
    """There and back with isend and irecv."""
    buffer = torch.empty_like(tensor)
    if rank == 0:
        work = dist.isend(tensor, 1)
        dist.irecv(buffer, 1).wait()
        work.wait()
    else:
        dist.irecv(buffer, 0).wait()
        dist.isend(tensor, 0).wait()


def there_and_back(transport: Transport, tensor: torch.Tensor) -> None:
    """There and back with a transport."""
    rank, peer = transport.rank, 1 - transport.rank
    tag = (0, 0, 0, 0)
    if rank == 0:
        transport.send(pack([tensor]), target=peer, tag=tag)
    transport.receive(source=peer, tag=tag, timeout_s=60, purpose="benchmark")
    if rank == 1:
        transport.send(pack([tensor]), target=peer, tag=tag)
    transport.flush()


def once_us(once: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Microseconds one way and of the processor, of something that goes there and back."""
    for _ in range(5):
        once()
    dist.barrier()
    start_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        once()
    wall_us = (time.perf_counter() - start_s) / rounds / 2 * 1e6
    return wall_us, (time.process_time() - cpu_s) / rounds / 2 * 1e6


def measure(name: str, size_bytes: int, once: Callable[[], None]) -> None:
    """Prints one line."""
    wall_us, cpu_us = once_us(once, max(10, min(ROUNDS, (256 << 20) // size_bytes)))
    if dist.get_rank() == 0:
        print(f"{size_bytes:>10,} bytes  {name:<14} {wall_us:9.0f} us  processor {cpu_us:7.0f} us")


def run(rank: int, folder: str) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    method = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    device = torch.device("cpu")
    transport = ProcessTransport(device)
    for size_bytes in SIZES_BYTES:
        tensor = torch.ones(size_bytes // 4)
        measure("ours", size_bytes, lambda x=tensor: there_and_back(transport, x))
        measure("bare gloo", size_bytes, lambda x=tensor: bare_gloo(rank, x))
    dist.barrier()
    transport.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder,), nprocs=2)
