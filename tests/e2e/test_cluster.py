"""The whole system on real processes: clients of every kind, two groups × TP 2, lost processes, clients that leave."""

import concurrent.futures
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from e2e.conftest import Groups

from nori_cluster.cluster.launch import Cluster
from nori_cluster.routing.base import GroupState
from nori_cluster.rpc.generated.nori.common.v1 import generation_pb2, sampling_pb2
from nori_cluster.rpc.generated.nori.inference.v1 import inference_service_pb2 as pb
from nori_cluster.rpc.generated.nori.inference.v1 import inference_service_pb2_grpc as pb_grpc

pytestmark = pytest.mark.e2e

PROMPT_IDS = [5, 9, 14, 30, 77, 12, 61, 8, 40, 41]


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT_IDS, "temperature": 0, "max_tokens": 12, "ignore_eos": True} | fields
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_openai_client_streaming_and_not(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16, "temperature": 0}
        whole = client.chat.completions.create(**ask)
        text, usage = "", None
        for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        assert usage is not None
        assert whole.usage is not None
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(usage, name) == getattr(whole.usage, name)


def test_grpc_client_says_what_http_says(cluster: Cluster, http: httpx.Client) -> None:
    want = complete(http)["choices"][0]["text"]
    sampling = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    task = pb.GenerationTask(
        model="tiny", tokens=generation_pb2.TokenSequence(ids=PROMPT_IDS), sampling=sampling, request_id="r1"
    )
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        whole = stub.Generate(pb.GenerateRequest(task=task), timeout=60)
        events = list(stub.StreamGenerate(pb.StreamGenerateRequest(task=task), timeout=60))
    assert whole.candidates[0].text == want
    assert whole.usage.completion_tokens == 12
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "completed"
    assert "".join(event.delta.text for event in events if event.HasField("delta")) == want


def test_the_prefix_cache_shows_in_usage_and_metrics(cluster: Cluster, http: httpx.Client) -> None:
    """The same long prompt until some group has it; a salt of its own keeps it apart."""
    prompt = [7, *PROMPT_IDS * 6]
    cached = [
        complete(http, prompt=prompt, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(4)
    ]
    assert cached[0] == 0
    assert cached[-1] == (len(prompt) - 1) // 16 * 16
    salted = complete(http, prompt=prompt, max_tokens=2, cache_salt="mine")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    deadline = time.monotonic() + 5
    while not re.search(
        r"nori_group_prefix_cache_hits_total\{[^}]*\} [1-9]", metrics := httpx.get(cluster.metrics_url).text
    ):
        assert time.monotonic() < deadline, metrics
        time.sleep(0.1)


def test_both_groups_work_and_all_answers_are_equal(http: httpx.Client, groups: Groups) -> None:
    before = {g.name: g.load.generated_tokens for g in groups.read()}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        texts = set(pool.map(lambda _: complete(http, max_tokens=24)["choices"][0]["text"], range(24)))
    assert len(texts) == 1
    groups.until(
        lambda now: all(g.load.generated_tokens > before[g.name] for g in now), 3.0, "both groups generated tokens"
    )
    groups.until_idle(3.0)


def nori(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nori_cluster.cli.main", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_nori_status_json(cluster: Cluster, groups: Groups) -> None:
    done = nori("status", "--admin", cluster.admin_address, "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    named = {group["name"]: group for group in status["groups"]}
    assert set(named) == {"tiny-0", "tiny-1"}
    for group in named.values():
        assert group["state"].lower() in {"ready", "busy"}
        assert len(group["workers"]) == 2
        for pid in [group["engine_pid"], *(worker["pid"] for worker in group["workers"])]:
            os.kill(pid, 0)


def test_nori_chat_one_shot(cluster: Cluster) -> None:
    done = nori("chat", "--url", cluster.http_url, "--max-tokens", "8", "hello")
    assert done.returncode == 0, done.stderr
    assert "tok" in done.stderr + done.stdout


def test_processes_import_only_what_they_may(cluster: Cluster, groups: Groups) -> None:
    """The engine process knows no torch, the gateway no Ray: their images show it."""
    for group in groups.read():
        maps = Path(f"/proc/{group.engine_pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "cygrpc" in maps
        assert all("libtorch" in Path(f"/proc/{worker.pid}/maps").read_text() for worker in group.workers)
    assert cluster.gateway_pid
    maps = Path(f"/proc/{cluster.gateway_pid}/maps").read_text()
    assert "_raylet" not in maps
    assert "libtorch" not in maps


@pytest.mark.parametrize("stream", [True, False])
def test_f25_a_client_that_leaves_frees_its_blocks_within_a_second(
    http: httpx.Client, groups: Groups, stream: bool
) -> None:
    groups.until_idle(5.0)
    address = (http.base_url.host, http.base_url.port)
    body = json.dumps(
        {"model": "tiny", "prompt": PROMPT_IDS, "max_tokens": 480, "ignore_eos": True, "n": 3, "stream": stream}
    )
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    with socket.create_connection(address) as client:
        client.sendall((head + body).encode())
        groups.until(lambda now: sum(g.load.running_sequences for g in now) == 3, 5.0, "three sequences run")
    groups.until_idle(1.0 + 0.5)  # half a second is how old a report may be
    assert complete(http)["usage"]["completion_tokens"] == 12


def stream_of(http: httpx.Client, number: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Token ids and all events of a long stream; every other one is sampled, with logprobs."""
    body: dict[str, Any] = {
        "model": "tiny", "prompt": [*PROMPT_IDS, 40 + number], "max_tokens": 200, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "temperature": 0.0 if number % 2 else 0.9, "seed": number,
        "logprobs": None if number % 2 else 1, "frequency_penalty": 0.4 if number % 3 == 0 else 0.0,
    }  # fmt: skip
    events, ids = [], []
    with http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line[6:]))
                for choice in events[-1].get("choices", ()):
                    ids += choice["token_ids"]
            elif line == "data: [DONE]":
                events.append({"done": True})
    return ids, events


UNDISTURBED: list[list[int]] = []


def undisturbed(http: httpx.Client) -> list[list[int]]:
    """What eight streams say when nothing happens to them, found once."""
    if not UNDISTURBED:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            UNDISTURBED.extend(ids for ids, _ in pool.map(lambda request: stream_of(http, request), range(8)))
    assert all(len(ids) == 200 for ids in UNDISTURBED)
    return UNDISTURBED


VICTIMS = [
    ("rank 1", signal.SIGKILL), ("engine process", signal.SIGKILL),
    ("rank 0", signal.SIGSTOP), ("engine process", signal.SIGSTOP),
]  # fmt: skip


@pytest.mark.parametrize(("victim", "number"), VICTIMS)
def test_a_lost_process_ends_its_group_and_no_stream(
    http: httpx.Client, groups: Groups, victim: str, number: signal.Signals
) -> None:
    """Killed or stopped: the group is replaced whole; its streams go on in the other one as if nothing had been."""
    groups.until_idle(5.0)
    whole = undisturbed(http)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream_of, http, request) for request in range(8)]
        loaded = groups.until(lambda now: all(g.load.running_sequences for g in now), 10.0, "both groups run")
        doomed = loaded[0]
        pids = [doomed.engine_pid, *(worker.pid for worker in doomed.workers)]
        rank = None if victim == "engine process" else int(victim[-1])
        os.kill(doomed.engine_pid if rank is None else doomed.workers[rank].pid, number)
        killed = time.monotonic()
        ends = [future.result() for future in streams]
    for request, (ids, events) in enumerate(ends):
        assert ids == whole[request], f"stream {request} says something else than undisturbed"
        assert events[-1] == {"done": True}
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        if request % 2 == 0:
            logprobs = [value for e in events[:-1] for value in e["choices"][0]["logprobs"]["token_logprobs"]]
            assert len(logprobs) == 200
    replaced = groups.until(
        lambda now: all(
            g.state in (GroupState.READY, GroupState.BUSY) and g.engine_pid not in (0, doomed.engine_pid)
            for g in now
            if g.name == doomed.name
        ),
        60.0,
        "the group is back",
    )
    (again,) = (g for g in replaced if g.name == doomed.name)
    assert not set(pids) & {again.engine_pid, *(worker.pid for worker in again.workers)}, "the group was repaired"
    pid = doomed.engine_pid if rank is None else doomed.workers[rank].pid
    assert again.last_failure.startswith(f"{victim} (pid {pid})"), again.last_failure
    assert again.last_failure.endswith("[127.0.0.1]")
    if rank is not None:
        assert re.search(r"it is in step \d+|its last step is \d+", again.last_failure)
    assert time.monotonic() - killed < 60
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not left, "the next incarnation started beside processes of the lost one"
    events = groups.events()
    lost = [event for event in events if event.kind == "lost" and event.group == doomed.name][-1]
    assert lost.message == again.last_failure
    complete(http)


def test_drafts_are_tried_kept_and_counted(http: httpx.Client, cluster: Cluster) -> None:
    """A text made to repeat itself: fewer steps than tokens, in usage and in the metrics."""
    reply = complete(http, logit_bias={"50": 100}, max_tokens=60, ignore_eos=True)
    details = reply["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 30
    assert reply["usage"]["completion_tokens"] == 60

    def kept() -> float:
        text = httpx.get(cluster.metrics_url).text
        lines = [
            line for line in text.splitlines() if line.startswith("nori_group_spec_decode_num_accepted_tokens_total")
        ]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    deadline = time.monotonic() + 5
    while kept() < 30 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert kept() > 30


def test_a_drained_group_hands_over_and_is_resumed(http: httpx.Client, groups: Groups) -> None:
    groups.until_idle(5.0)
    whole = undisturbed(http)[:4]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream_of, http, request) for request in range(4)]
        loaded = groups.until(lambda now: all(g.load.running_sequences for g in now), 10.0, "both groups run")
        name = loaded[0].name
        operation = groups.drain(name, 0.0)
        assert (operation.done, operation.error_code) == (True, 0), operation.error_message
        assert [future.result()[0] for future in streams] == whole
    groups.until(lambda now: any(g.state is GroupState.DRAINING for g in now), 5.0, "the drain shows")
    complete(http)
    groups.resume(name)
    groups.until(lambda now: all(g.state is GroupState.READY for g in now), 5.0, "it takes work again")
