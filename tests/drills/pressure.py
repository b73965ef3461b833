"""Too little of something: KV blocks, room in the queue, room on the disk for logs; and a clock that jumps."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
from drills.load import PATIENCE, REFUSED, Load, ask
from drills.stage import FIRST, GROUPS, SECOND, SEQUENCES, Missing, Setting, Stage

FLOOD = 20  # times what the groups run at once
QUEUED = 24  # requests that may wait in the router
FULL_SECONDS = 30.0  # of a full disk after the kill
DISK = 48 << 20  # bytes for Ray's session and all logs
FEW_BLOCKS = 26  # of 16 tokens, per group: two requests of 167 tokens, and half a third
JUMPS = ("+3600", "-7200", "+86400")  # seconds the clock is off, one after the other
FAKETIME = "libfaketimeMT.so.1"


def few_blocks() -> Setting:
    return Setting(blocks=FEW_BLOCKS)


async def exhaust_kv(stage: Stage, load: Load) -> str:
    """Twelve streams for KV blocks of five: they wait or are preempted, and a rank is killed meanwhile."""
    await asyncio.sleep(4.0)
    group = await stage.somebody()
    stage.hit(group, group.workers[0].pid, signal.SIGKILL)
    await stage.whole()
    await asyncio.sleep(4.0)
    assert stage.second is not None
    text = await stage.second.metrics()  # it sees the same groups as the first
    preempted = sum(float(n) for n in re.findall(r"^nori_group_num_preemptions_total\S* (\S+)", text, re.M))
    fullest = max(1.0 - g.load.free_kv_blocks / g.load.total_kv_blocks for g in await stage.groups())
    return f"{FEW_BLOCKS} blocks per group; {preempted:.0f} preemptions seen, a group {fullest:.0%} full"


def short_queue() -> Setting:
    return Setting(queued=QUEUED)


async def flood_queue(stage: Stage, load: Load) -> str:
    """Twenty times what runs at once, at once: each is answered whole or refused at once with Retry-After."""
    count = FLOOD * GROUPS * SEQUENCES
    limits = httpx.Limits(max_connections=count)
    async with (
        httpx.AsyncClient(base_url=stage.gateways[FIRST], timeout=PATIENCE, limits=limits) as one,
        httpx.AsyncClient(base_url=stage.gateways[SECOND], timeout=PATIENCE, limits=limits) as two,
    ):
        asked = [ask((one, two)[n % 2], n % 12, load.tokens, (FIRST, SECOND)[n % 2]) for n in range(count)]
        outcomes = await asyncio.gather(*asked)
    refused = [o for o in outcomes if o.status in REFUSED]
    load.outcomes += [o for o in outcomes if o.status not in REFUSED]
    answered = len(outcomes) - len(refused)
    assert refused, f"none of {count} requests was refused"
    assert answered >= QUEUED, f"only {answered} of {count} were answered, {QUEUED} may wait"
    slowest = max(o.waited for o in refused)
    begin = time.monotonic()
    async with httpx.AsyncClient(base_url=stage.gateways[FIRST], timeout=60.0) as client:
        while (after := await ask(client, 1, load.tokens)).status in REFUSED:
            await asyncio.sleep(0.2)
    assert after.whole, after.error
    return (
        f"{count} at once: {answered} answered, {len(refused)} refused with Retry-After, the slowest after "
        f"{slowest:.1f} s; {time.monotonic() - begin:.1f} s later one more was answered"
    )


def small_disk() -> Setting:
    """Ray's session folder and the log of every process on a tmpfs of its own."""
    if os.geteuid() != 0:
        raise Missing("needs root, to mount a tmpfs")
    folder = Path(tempfile.mkdtemp(prefix="nd-"))  # short: Ray puts sockets with long names below it
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "drill", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        folder.rmdir()
        raise Missing(f"cannot mount a tmpfs here: {done.stderr.strip()}")

    def undo() -> None:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()

    return Setting(temporary=folder, log=folder / "log", undo=undo)


async def fill_disk(stage: Stage, load: Load) -> str:
    """No room for logs any more, then a rank is killed: streams go on, its group is back at the latest with room."""
    folder = stage.setting.temporary
    assert folder is not None
    await asyncio.to_thread(_fill, folder / "ballast")
    left = shutil.disk_usage(folder).free
    await asyncio.sleep(2.0)
    group = await stage.somebody()
    stage.hit(group, group.workers[1].pid, signal.SIGKILL)
    begin = time.monotonic()
    while (took := time.monotonic() - begin) < FULL_SECONDS and not await stage.is_whole():
        await asyncio.sleep(0.2)
    came = "" if took < FULL_SECONDS else f"not within {FULL_SECONDS:g} s, but "
    await asyncio.to_thread((folder / "ballast").unlink)
    await stage.whole()
    since = "after the kill" if not came else "after the kill, once there was room again"
    took = time.monotonic() - begin
    return f"{left} bytes left of {DISK >> 20} MiB; the group of the killed rank was back {came}{took:.0f} s {since}"


def _fill(ballast: Path) -> None:
    """Until nothing more can be written."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return


def odd_clock() -> Setting:
    """The second gateway reads its clock from a file; its monotonic clock is the machine's, as when a clock is set."""
    found = [path for folder in ("/usr/lib", "/usr/lib64", "/usr/local/lib") for path in Path(folder).rglob(FAKETIME)]
    if not found:
        raise Missing("needs libfaketime: apt-get install libfaketime")
    folder = Path(tempfile.mkdtemp(prefix="drill-clock-"))
    clock = folder / "offset"
    clock.write_text("+0\n")
    environment = {
        "LD_PRELOAD": str(found[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    return Setting(environment=environment, undo=lambda: shutil.rmtree(folder))


async def jump_clock(stage: Stage, load: Load) -> str:
    """The clock of one gateway jumps an hour ahead, then two back, then a day ahead; deadlines are time left."""
    clock = Path(stage.setting.environment["FAKETIME_TIMESTAMP_FILE"])
    seen = []
    for jump in JUMPS:
        await asyncio.to_thread(clock.write_text, f"{jump}\n")
        await asyncio.sleep(3.0)
        seen.append(await _offset(stage))
    wanted = [float(jump) for jump in JUMPS]
    assert all(abs(s - w) < 5.0 for s, w in zip(seen, wanted, strict=True)), (
        f"the clock was off by {seen}, not {wanted}"
    )
    assert load.of([SECOND]), "no request ended at the gateway with the odd clock"
    return f"off by {', '.join(f'{s:+.0f}' for s in seen)} s; {len(load.of([SECOND]))} requests ended there meanwhile"


async def _offset(stage: Stage) -> float:
    """By how much the second gateway's clock is ahead, from `created` of an answer."""
    body = {"model": "tiny", "prompt": [20, 21], "max_tokens": 1}
    async with httpx.AsyncClient(base_url=stage.gateways[SECOND], timeout=60.0) as client:
        reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return float(reply.json()["created"]) - time.time()
