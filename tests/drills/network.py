"""The line between a gateway and its groups down, cut, reset, slow and late: the second gateway lives in a namespace.

namespace ── veth "inside" ── router, groups, admin plane (host side)      here the drills take hold
          ── veth "outside" ─ the load                                     this one is left alone
"""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable

from drills.load import Load
from drills.relay import Relay
from drills.stage import Missing, Setting, Stage

OUTAGE = 6.0  # seconds
RATE = "96kbit"
DELAY = 0.15  # seconds each way
NAME = f"drill{os.getpid() % 10000}"
INSIDE, OUTSIDE = f"{NAME}i", f"{NAME}o"  # the host's ends; the namespace's are INSIDE+"n", OUTSIDE+"n"
NET = os.getpid() % 250


def namespace() -> Setting:
    """Missing where this machine has no root or no iproute2."""
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("iptables", "iptables")):
        if shutil.which(tool) is None:
            raise Missing(f"needs {tool}: apt-get install {package}")
    if os.geteuid() != 0:
        raise Missing("needs root, for network namespaces")
    remove()
    try:
        sh("ip", "netns", "add", NAME)
        for link, net in ((INSIDE, 77), (OUTSIDE, 78)):
            sh("ip", "link", "add", link, "type", "veth", "peer", "name", f"{link}n", "netns", NAME)
            sh("ip", "addr", "add", f"10.{net}.{NET}.1/30", "dev", link)
            sh("ip", "link", "set", link, "up")
            inside("ip", "addr", "add", f"10.{net}.{NET}.2/30", "dev", f"{link}n")
            inside("ip", "link", "set", f"{link}n", "up")
        inside("ip", "link", "set", "lo", "up")
    except Missing:
        remove()
        raise
    return Setting(
        host=f"10.77.{NET}.1",
        second_host=f"10.78.{NET}.2",
        prefix=("ip", "netns", "exec", NAME),
        undo=remove,
    )


def remove() -> None:
    """The namespace, and with it both links."""
    subprocess.run(["ip", "netns", "del", NAME], capture_output=True, check=False)
    for link in (INSIDE, OUTSIDE):
        subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)


def sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"`{' '.join(command)}` does not work here: {done.stderr.strip()}")


def inside(*command: str) -> None:
    sh("ip", "netns", "exec", NAME, *command)


@contextlib.asynccontextmanager
async def rule(*words: str) -> AsyncIterator[None]:
    """An iptables rule in the namespace: words are the table (-t nat), then chain and match."""
    table = list(words[:2]) if words[0] == "-t" else []
    rest = words[len(table) :]
    await asyncio.to_thread(inside, "iptables", *table, "-I", *rest)
    try:
        yield
    finally:
        await asyncio.to_thread(inside, "iptables", *table, "-D", *rest)


async def link_down(stage: Stage, load: Load) -> str:
    """The gateway sees neither router nor groups for six seconds: its streams wait and go on."""
    await asyncio.to_thread(inside, "ip", "link", "set", f"{INSIDE}n", "down")
    await asyncio.sleep(OUTAGE)
    await asyncio.to_thread(inside, "ip", "link", "set", f"{INSIDE}n", "up")
    took = await linked(stage)
    return f"down for {OUTAGE:g} s; both groups in reach {took:.1f} s later"


async def cut_line(stage: Stage, load: Load) -> str:
    """Packets to and from one group vanish in silence: its streams go on in the other group."""
    port = await data_port(stage)
    before = await continuations(stage)
    async with (
        rule("INPUT", "-p", "tcp", "--sport", port, "-j", "DROP"),
        rule("OUTPUT", "-p", "tcp", "--dport", port, "-j", "DROP"),
    ):
        noticed = await until(stage, lambda up: up == 1, "the cut is not noticed")
        await asyncio.sleep(3.0)
    took = await linked(stage)
    moved = await continuations(stage) - before
    assert moved, "no stream went on in the other group"
    return f"noticed after {noticed:.1f} s, {moved} streams went on elsewhere; in reach {took:.1f} s after the end"


async def reset_line(stage: Stage, load: Load) -> str:
    """Every connection to one group is reset for two seconds: its streams go on in the other group."""
    port = await data_port(stage)
    before = await continuations(stage)
    async with rule("OUTPUT", "-p", "tcp", "--dport", port, "-j", "REJECT", "--reject-with", "tcp-reset"):
        noticed = await until(stage, lambda up: up == 1, "the reset is not noticed")
        await asyncio.sleep(2.0)
    took = await linked(stage)
    moved = await continuations(stage) - before
    return f"noticed after {noticed:.1f} s, {moved} streams went on elsewhere; in reach {took:.1f} s after the end"


async def slow_link(stage: Stage, load: Load) -> str:
    """Tokens come through a pipe of 96 kbit/s for eight seconds: slowly, but all and in order."""
    shape = ("rate", RATE, "burst", "4kb", "latency", "3000ms")
    await asyncio.to_thread(sh, "tc", "qdisc", "add", "dev", INSIDE, "root", "tbf", *shape)
    try:
        await asyncio.sleep(8.0)
    finally:
        await asyncio.to_thread(sh, "tc", "qdisc", "del", "dev", INSIDE, "root")
    took = await linked(stage)
    return f"{RATE} for 8 s; both groups in reach {took:.1f} s later"


async def late_line(stage: Stage, load: Load) -> str:
    """One group's packets take 150 ms each way through a relay, which then stalls, then cuts."""
    group = await stage.somebody()
    port = group.address.rpartition(":")[2]
    host = stage.setting.host
    async with await Relay(host, int(port)).start(host) as relay:
        relay.delay = DELAY
        to = f"{host}:{relay.port}"
        async with rule("-t", "nat", "OUTPUT", "-p", "tcp", "--dport", port, "-j", "DNAT", "--to-destination", to):
            async with rule("OUTPUT", "-p", "tcp", "--dport", port, "-j", "REJECT", "--reject-with", "tcp-reset"):
                await until(stage, lambda up: up == 1, "the reset is not noticed")
            await linked(stage)
            assert relay.connections, "the gateway went around the relay"
            await asyncio.sleep(3.0)
            before, begin = await continuations(stage), time.monotonic()
            while not await open_sequences(stage, group.name) and time.monotonic() - begin < 10.0:
                await asyncio.sleep(0.05)
            relay.stall()
            noticed = await until(stage, lambda up: up == 1, "the stall is not noticed")
            relay.flow()
            await linked(stage)
            relay.cut()
            await asyncio.sleep(1.0)
        await linked(stage)
        moved = await continuations(stage) - before
    took = await linked(stage)
    return (
        f"{DELAY * 1000:.0f} ms each way; then a stall, noticed after {noticed:.1f} s, and a cut: {moved} streams "
        f"went on; in reach {took:.1f} s after the end"
    )


# -- what the gateway in the namespace says of itself -----------------------------------------------------------------


async def data_port(stage: Stage) -> str:
    """Of the data plane of a group that takes work."""
    return (await stage.somebody()).address.rpartition(":")[2]


async def metrics(stage: Stage) -> str:
    assert stage.second is not None
    return await stage.second.metrics()


async def reachable(stage: Stage) -> int:
    """Groups with an open line."""
    return len(re.findall(r'^nori_group_up\{[^}]*link="open"[^}]*\} 1', await metrics(stage), re.M))


async def open_sequences(stage: Stage, group: str) -> int:
    """Of this gateway in the group."""
    found = re.search(rf'^nori_group_open_sequences\{{[^}}]*group="{group}"[^}}]*\}} (\S+)', await metrics(stage), re.M)
    return int(float(found[1])) if found else 0


async def continuations(stage: Stage) -> int:
    return sum(int(float(n)) for n in re.findall(r"^nori_continuations_total\S* (\S+)", await metrics(stage), re.M))


async def until(stage: Stage, condition: Callable[[int], bool], otherwise: str) -> float:
    """Seconds until it holds for the number of reachable groups; 20 at most."""
    begin = time.monotonic()
    while not condition(await reachable(stage)):
        assert time.monotonic() - begin < 20.0, otherwise
        await asyncio.sleep(0.1)
    return time.monotonic() - begin


async def linked(stage: Stage) -> float:
    """Seconds until both groups can be reached again."""
    return await until(stage, lambda up: up == 2, "the line does not come back")
