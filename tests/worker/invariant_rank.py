"""One rank in batch-invariant mode, run as a process by test_invariance.py and scripts/numerics.py.

argv: checkpoint folder, dtype, rank, size, rendezvous file, length of the sequence, most tokens computed one by one.
Prints "equal" when no way of running gave other bits.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from fakes.mixing import differences
from fakes.stepping import group_config, load_worker

from nori_cluster.device.parallel import TorchTPGroup


def same_sum_everywhere(group: TorchTPGroup) -> bool:
    """all_reduce gives every rank rank 0's bits, and a row its bits in a message of any size."""
    generator = torch.Generator().manual_seed(group.rank)
    whole = torch.randn(3000, 60, generator=generator)
    total = group.all_reduce(whole.clone())
    first = total.clone()
    group.broadcast(first)
    parts = [group.all_reduce(whole[:rows].clone()) for rows in (1, 7, 64, 1000)]
    return torch.equal(first, total) and all(torch.equal(part, total[: len(part)]) for part in parts)


def main() -> None:
    folder, dtype, rank, size, store, length, singles = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, int(size)),
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=60),
    )
    group = TorchTPGroup(dist.group.WORLD)
    config = group_config(Path(folder), dtype=dtype, tp=int(size), num_blocks=400, batch_invariant=True)
    found = differences(load_worker(config, group), int(length), every=40, singles=int(singles))
    print("equal" if same_sum_everywhere(group) and not any(found.values()) else found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
