"""One rank of a tensor-parallel group, run as a process by test_parallel.py; rank 0 writes what it found.

argv: checkpoint folder, rank, size, rendezvous file, file for the result. The program lives in `found`.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from fakes.stepping import Driver, group_config, load_worker, rank_logits

from nori_cluster.device.parallel import SoloGroup, TorchTPGroup, TPGroup
from nori_cluster.types import RowSampling

PROMPTS = [list(range(3, 3 + length)) for length in (40, 1, 17)]
SAMPLINGS = [
    RowSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, candidate=0, logprobs=20),
    RowSampling(temperature=5.0, top_p=1.0, top_k=0, seed=7, candidate=1),
    RowSampling(temperature=1.0, top_p=0.9, top_k=50, seed=8, candidate=0),
]


def found(folder: Path, group: TPGroup) -> dict[str, object] | None:
    """Logits of a sequence and the tokens of three sampled rows; None on ranks other than 0."""
    worker = load_worker(group_config(folder, tp=group.size), group)
    logits = rank_logits(worker, PROMPTS[0], [23, 1, 16])
    driver = Driver(worker)
    for slot, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        driver.start(slot, prompt, sampling)
    tokens = driver.generate(range(3), 60)
    tables = worker.table.tokens[:3, :80].copy()
    mine = torch.from_numpy(tables)
    theirs = mine.clone()
    group.broadcast(theirs)
    assert torch.equal(mine, theirs), "ranks disagree about the tokens"
    return None if group.rank else {"logits": logits, "tokens": tokens, "blocks": worker.cache.num_blocks}


def main() -> None:
    folder, rank, size, store, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, int(size)),
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=60),
    )
    group: TPGroup = TorchTPGroup(dist.group.WORLD) if int(size) > 1 else SoloGroup()
    result = found(Path(folder), group)
    if result is not None:
        torch.save(result, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
