"""The event scanner against its slow twin, whatever pieces the stream comes in; what an Answer makes of chunks."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nori_cluster.bench.sse import EventScanner
from nori_cluster.bench.stream import Answer, RequestFailed, refusal_text
from nori_cluster.bench.workload import Planned

pytestmark = pytest.mark.unit


def slowly(stream: bytes) -> list[bytes]:
    """The events of a whole stream, by the rules of the HTML standard that matter here."""
    out = []
    for block in re.split(rb"\n\n", stream.replace(b"\r\n", b"\n"))[:-1]:
        data = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        if data:
            out.append(b"\n".join(data))
    return out


LINES = st.sampled_from(
    [b'data: {"a": 1}', b"data:x", b"data: \xc3\xa9\xf0\x9f\x98\x80", b": ping", b"event: e", b"data:"]
)
EVENTS = st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=6)


@given(events=EVENTS, end=st.sampled_from([b"\n", b"\r\n"]), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_any_pieces_give_the_events_of_the_whole(events: list[list[bytes]], end: bytes, cuts: list[int]) -> None:
    stream = b"".join(end.join(lines) + end + end for lines in events)
    scanner, found = EventScanner(), []
    places = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    for start, stop in pairwise(places):
        found += scanner.feed(stream[start:stop])
    assert found == slowly(stream)
    assert scanner.rest == b""


def test_an_event_that_is_not_complete_waits() -> None:
    scanner = EventScanner()
    assert scanner.feed(b"data: a\n\ndata: b\n") == [b"a"]
    assert scanner.rest == b"data: b\n"
    assert scanner.feed(b"\n") == [b"b"]


def chunk(choice: str, rest: str = "") -> bytes:
    return b'{"id":"x","choices":[{"index":0,%b}]%b}' % (choice.encode(), rest.encode())


def answered(*payloads: bytes) -> Answer:
    answer = Answer()
    for second, payload in enumerate(payloads):
        answer.take(payload, float(second))
    return answer


USAGE = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}'


def test_completion_chunks_count_even_with_an_empty_text_but_not_the_bare_end() -> None:
    payloads = (
        chunk('"text":"a"'),
        chunk('"text":""'),
        chunk('"text":"c"'),
        chunk('"text":"","finish_reason":"length"'),
    )
    answer = answered(*payloads, USAGE, b"[DONE]")
    answer.check_end()
    record = answer.record(Planned(4, 1.0, 7, 3), 10.0, 9.0, None)
    assert record.events == (-9.0, -8.0, -7.0)
    assert record.event_tokens == (1, 1, 1)
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 3, 2)
    assert record.finish_reason == "length"
    assert (record.number, record.due, record.failure) == (4, 1.0, None)


def test_chat_chunks_count_with_content_or_reasoning_only() -> None:
    role = chunk('"delta":{"role":"assistant","content":""}')
    text = chunk('"delta":{"content":"hi"}')
    thought = chunk('"delta":{"reasoning_content":"hm"}')
    end = chunk('"delta":{},"finish_reason":"stop"')
    assert answered(role, text, thought, end).times == [1.0, 2.0]


def test_token_ids_say_how_many_tokens_an_event_holds() -> None:
    two = chunk('"text":"ab","token_ids":[5,6]')
    one = chunk('"text":"c","token_ids":[7],"finish_reason":"length"')
    answer = answered(two, one)
    record = answer.record(Planned(0, None, 1, 3), 0.0, 0.0, None)
    assert record.event_tokens == (2, 1)
    assert record.token_ids == (5, 6, 7)
    assert record.output_tokens == 3


def test_several_tokens_per_event_that_nobody_counts_are_not_made_up() -> None:
    record = answered(chunk('"text":"abc"'), USAGE).record(Planned(0, None, 1, 3), 0.0, 0.0, None)
    assert record.event_tokens == ()
    assert record.output_tokens == 3


@pytest.mark.parametrize(
    ("payload", "kind", "words"),
    [
        (b'{"error":{"message":"out of memory"}}', "broken_stream", "out of memory"),
        (b'{"error":"plain"}', "broken_stream", "plain"),
        (b"{oops", "protocol", "oops"),
        (b'{"choices":3}', "protocol", "choices"),
    ],
)
def test_bad_events(payload: bytes, kind: str, words: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        answered(payload)
    assert caught.value.kind == kind
    assert words in caught.value.message


def test_bad_ends() -> None:
    with pytest.raises(RequestFailed, match=r"before \[DONE\], after 1 events"):
        answered(chunk('"text":"a"')).check_end()
    with pytest.raises(RequestFailed, match="no text and no tokens"):
        answered(b"[DONE]").check_end()


def test_refusals_in_every_dress() -> None:
    assert refusal_text(400, b'{"error":{"message":"too long"}}') == "HTTP 400: too long"
    assert refusal_text(500, b'{"error":"plain"}') == "HTTP 500: plain"
    assert refusal_text(502, b"<html>Bad gateway</html>") == "HTTP 502: <html>Bad gateway</html>"
    assert refusal_text(503, b"") == "HTTP 503: no reason given"
    assert refusal_text(422, b'{"detail":[1]}') == "HTTP 422: {'detail': [1]}"
