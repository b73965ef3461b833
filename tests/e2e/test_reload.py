"""Weights replaced under streams: each answer is whole of one version, and afterwards everything is of the new one."""

import concurrent.futures
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e.conftest import Groups
from e2e.test_cluster import nori, stream_of, undisturbed
from fakes.checkpoints import make_tiny_llama

from nori_cluster.cluster.launch import Cluster
from nori_cluster.routing.base import GroupState

pytestmark = pytest.mark.e2e
UP = (GroupState.READY, GroupState.BUSY)


def reload_weights(cluster: Cluster, folder: Path, *options: str) -> Any:
    done = nori("reload-weights", "tiny", str(folder), "--json", *options, "--admin", cluster.admin_address)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def up(groups: Groups, version: str) -> list[Any]:
    return groups.until(
        lambda now: all(g.state in UP and g.weight_version == version for g in now), 30.0, f"all hold {version}"
    )


def test_no_answer_mixes_two_versions(
    cluster: Cluster, http: httpx.Client, groups: Groups, tiny_folder: Path, tmp_path: Path
) -> None:
    new = make_tiny_llama(tmp_path / "new", max_positions=512, seed=1)
    groups.until_idle(10.0)
    old_says = undisturbed(http)
    before = up(groups, "1")
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        first = [pool.submit(stream_of, http, request) for request in range(8)]
        groups.until(lambda now: all(g.load.running_sequences for g in now), 10.0, "all groups run")
        reloading = pool.submit(reload_weights, cluster, new, "--in-flight-policy", "continue", "--grace", "40")
        later = []
        while not reloading.done():
            later.append((len(later) % 8, pool.submit(stream_of, http, len(later) % 8)))
            time.sleep(0.3)
        assert reloading.result()["done"]
        ends = [(request, future.result()[0]) for request, future in [*enumerate(first), *later]]
    groups.until_idle(10.0)
    after = up(groups, "2")
    assert [g.engine_pid for g in after] == [g.engine_pid for g in before], "no process was started anew"
    assert {g.numerics_id for g in after}.isdisjoint(g.numerics_id for g in before)
    new_says = [stream_of(http, request)[0] for request in range(8)]
    assert all(a != b for a, b in zip(old_says, new_says, strict=True))
    assert [ids for _, ids in ends[:8]] == old_says, "what had begun went on with the old weights"
    assert all(ids in (old_says[request], new_says[request]) for request, ids in ends)

    victim = after[0]
    os.kill(victim.engine_pid, signal.SIGKILL)
    groups.until(lambda now: now[0].incarnation > victim.incarnation and now[0].state in UP, 60.0, "it is back")
    assert {g.numerics_id for g in up(groups, "2")} == {victim.numerics_id}
    assert stream_of(http, 3)[0] == new_says[3]

    other = make_tiny_llama(tmp_path / "other", max_positions=512, intermediate=128)
    refused = nori("reload-weights", "tiny", str(other), "--admin", cluster.admin_address)
    assert refused.returncode == 1
    assert "intermediate_size is 128, the loaded model has 256" in refused.stderr
    assert stream_of(http, 3)[0] == new_says[3]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        cut = [pool.submit(stream_of, http, request) for request in range(8)]
        groups.until(lambda now: all(g.load.running_sequences for g in now), 10.0, "all groups run")
        reload_weights(cluster, tiny_folder, "--in-flight-policy", "abort", "--max-unavailable", "2")
        for request, future in enumerate(cut):
            ids, events = future.result()
            assert ids == new_says[request][: len(ids)]
            if len(ids) < 200:
                assert "the weights of the model are being replaced" in json.dumps(events[-2:])
        assert any(len(future.result()[0]) < 200 for future in cut)
    up(groups, "3")
    assert [stream_of(http, request)[0] for request in range(8)] == old_says
