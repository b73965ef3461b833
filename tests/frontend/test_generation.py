"""Generation over the FakeBackend: terminal events, stop strings, counting, closing; and a seeded random walk."""

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import cycle
from typing import Any

import pytest
from fakes.backend import FakeBackend, Script
from fakes.text import ABC, DEF, EMOJI_HEAD, EOS, HELLO, ids_of, served_model

from nori_cluster.errors import Cancelled, CapacityExceeded, ContextLengthExceeded, EngineFailure, NoriError
from nori_cluster.frontend.service import Delta, Generation, GenerationCall, Service
from nori_cluster.types import FinishReason, SamplingParams

pytestmark = pytest.mark.unit
SERVED = served_model()


def service_of(script: Any, **options: Any) -> tuple[Service, FakeBackend]:
    backend = FakeBackend(script, **options)
    return Service(backend, {"smol": SERVED}), backend


def call(prompts: Any = ((5, 6),), every_token: bool = False, **sampling: Any) -> GenerationCall:
    return GenerationCall(
        model="smol",
        prompts=[tuple(ids) for ids in prompts],
        sampling=SamplingParams(**{"max_tokens": 16, **sampling}),
        request_id="r",
        every_token=every_token,
    )


async def stream(generation: Generation) -> dict[int, list[Delta]]:
    await generation.admitted()
    seen: dict[int, list[Delta]] = {}
    async for deltas in generation:
        assert len({delta.index for delta in deltas}) == len(deltas)
        for delta in deltas:
            seen.setdefault(delta.index, []).append(delta)
    return seen


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


F04_TOKENS = [ABC, DEF, *ids_of("G"), EOS]
F04_CASES: list[tuple[dict[str, Any], str, str | int | None, int]] = [
    ({"stop": ("DEFG",)}, "ABC", "DEFG", 3),
    ({"stop": ("DEFX",)}, "ABCDEFG", None, 4),
    ({"stop": ("\n", "DEFGH", "EFX")}, "ABCDEFG", None, 4),
    ({"stop": ("FG",), "max_tokens": 3}, "ABCDE", "FG", 3),
]


@pytest.mark.parametrize(("sampling", "text", "stop_reason", "count"), F04_CASES)
@pytest.mark.parametrize("chunk", [1, 2, 4])
async def test_f04_stop_strings(
    sampling: dict[str, Any], text: str, stop_reason: str | None, count: int, chunk: int
) -> None:
    service, backend = service_of(Script(tokens=F04_TOKENS, chunk=chunk))
    streamed = service.generate(call(**sampling))
    deltas = (await stream(streamed))[0]
    assert text_of(deltas) == text
    assert all(delta.text or delta.finish_reason for delta in deltas), "an empty delta while text was held back"
    assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.STOP]
    assert deltas[-1].stop_reason == stop_reason
    assert streamed.usage.completion_tokens == count
    whole = service.generate(call(**sampling))
    (result,) = await whole.result()
    assert (result.text, result.stop_reason, whole.usage) == (text, stop_reason, streamed.usage)
    await asyncio.sleep(0)
    assert not backend.open


async def test_stop_string_aborts_though_nobody_reads() -> None:
    service, backend = service_of(Script(tokens=cycle([HELLO])))
    generation = service.generate(call(stop=("ohe",), max_tokens=200))
    await generation.admitted()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not backend.open
    assert backend.generated <= 4
    (delta,) = await generation.result()
    assert (delta.text, delta.finish_reason, generation.usage.completion_tokens) == ("hell", FinishReason.STOP, 2)


async def test_stop_string_waiting_for_the_whole_result_aborts() -> None:
    service, backend = service_of(Script(tokens=cycle([HELLO])))
    generation = service.generate(call(stop=("ohe",), max_tokens=200))
    (delta,) = await generation.result()
    assert delta.text == "hell"
    assert backend.generated <= 4


async def test_the_stopping_token_counts_but_shows_no_text() -> None:
    service, _ = service_of(Script(tokens=[ABC, DEF, HELLO]))
    generation = service.generate(call(stop_token_ids=(DEF,)))
    (delta,) = (await stream(generation))[0][-1:]
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, DEF)
    assert generation.usage.completion_tokens == 2
    kept = service.generate(call(stop_token_ids=(DEF,), include_stop_str_in_output=True))
    assert (await kept.result())[0].text == "ABCDEF"
    hidden = service.generate(call(stop_token_ids=(DEF,), skip_special_tokens=False))
    assert (await hidden.result())[0].text == "ABC"


@pytest.mark.parametrize("chunk", [1, 3])
async def test_f02_cut_character_is_flushed_once(chunk: int) -> None:
    service, _ = service_of(Script(tokens=[EMOJI_HEAD, 3 + 0x98, 3 + 0x80, EMOJI_HEAD, 3 + 0x98], chunk=chunk))
    generation = service.generate(call(max_tokens=5))
    deltas = (await stream(generation))[0]
    assert text_of(deltas) == "\U0001f600\ufffd"
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    (whole,) = await service.generate(call(max_tokens=5)).result()
    assert whole.text == text_of(deltas)


async def test_fault_ends_all_candidates_and_delivers_what_came_before() -> None:
    fault = EngineFailure("worker 1 died")
    service, backend = service_of(
        lambda request, number: Script(tokens=cycle([HELLO]), fault=fault if number == 1 else None, fault_after=2)
    )
    generation = service.generate(call(n=3, max_tokens=100))
    await generation.admitted()
    seen: dict[int, str] = {}

    async def read() -> None:
        async for deltas in generation:
            for delta in deltas:
                assert delta.finish_reason is None
                seen[delta.index] = seen.get(delta.index, "") + delta.text

    with pytest.raises(EngineFailure):
        await read()
    assert seen[1] == "hellohello"
    await asyncio.sleep(0)
    assert not backend.open
    assert service.running == 0


@pytest.mark.parametrize("way", ["admitted", "result"])
async def test_a_refusal_aborts_the_siblings(way: str) -> None:
    refusal = CapacityExceeded("the prompt can never fit the KV cache")
    service, backend = service_of(
        lambda request, number: Script(
            tokens=cycle([HELLO]), refusal=refusal if request.prompt_token_ids == (7,) else None
        )
    )
    generation = service.generate(call([(5,), (7,), (9,)], max_tokens=100))
    with pytest.raises(CapacityExceeded):
        await getattr(generation, way)()
    await asyncio.sleep(0)
    assert not backend.open


async def test_refused_prompts_schedule_nothing() -> None:
    service, backend = service_of(None, max_model_len=64)
    for prompts, sampling in (([range(60)], {"max_tokens": 5}), ([[5], []], {}), ([[5], [265]], {})):
        with pytest.raises((ContextLengthExceeded, NoriError)):
            service.generate(call(prompts, **sampling))
    assert not backend.requests
    assert service.running == 0


async def test_close_is_idempotent_and_wakes_the_reader() -> None:
    service, backend = service_of(Script(tokens=cycle([HELLO]), step=0.5))
    generation = service.generate(call(n=2))
    reader = asyncio.ensure_future(stream(generation))
    await asyncio.sleep(0.01)
    generation.close()
    generation.close()
    with pytest.raises(Cancelled):
        await reader
    await asyncio.sleep(0)
    assert len(backend.aborts) == 2
    assert not backend.open
    assert service.metrics.model("smol").aborted == 1


async def test_seeds_are_drawn_and_kept() -> None:
    service, backend = service_of(None)
    for seed in (None, -1, 7, -2):
        await service.generate(call([(5,), (6,)], seed=seed, max_tokens=1)).result()
    drawn = [request.seed for request in backend.requests]
    assert len(set(drawn[:4])) == 4
    assert drawn[4:] == [7, 7, 2**64 - 2, 2**64 - 2]
    assert len({request.id for request in backend.requests}) == 8


async def test_cached_tokens_count_each_prompt_once() -> None:
    service, _ = service_of(Script(tokens=[HELLO], cached_tokens=2))
    generation = service.generate(call([(5, 6, 7), (8, 9)], n=3, max_tokens=1))
    assert [delta.index for delta in await generation.result()] == list(range(6))
    usage = generation.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 6, 4)


async def test_a_slow_reader_gets_merged_deltas() -> None:
    service, _ = service_of(Script(tokens=[*[HELLO] * 9, EOS]))
    generation = service.generate(call())
    await generation.admitted()
    await asyncio.sleep(0.01)
    deltas = [delta async for batch in generation for delta in batch]
    assert [delta.text for delta in deltas] == ["hello" * 9]
    assert deltas[0].finish_reason is FinishReason.STOP


async def test_every_token_brings_a_delta_when_asked() -> None:
    service, _ = service_of(Script(tokens=[EMOJI_HEAD, 3 + 0x98, 3 + 0x80, EOS]))
    generation = service.generate(call(every_token=True))
    deltas = (await stream(generation))[0]
    assert [delta.token_ids for delta in deltas] == [[EMOJI_HEAD], [3 + 0x98], [3 + 0x80], [EOS]]
    assert [delta.text for delta in deltas] == ["", "", "\U0001f600", ""]


async def slow_reader(generation: Generation, rng: random.Random) -> AsyncIterator[list[Delta]]:
    async for deltas in generation:
        yield deltas
        for _ in range(rng.choice((0, 0, 1, 5))):
            await asyncio.sleep(0)


def random_script(rng: random.Random) -> Script:
    alphabet = [ABC, DEF, HELLO, EMOJI_HEAD, 3 + 0x98, 3 + 0x80, *ids_of("a\nb")]
    tokens = [rng.choice(alphabet) for _ in range(rng.randrange(1, 30))]
    fault = EngineFailure("planted") if rng.random() < 0.1 else None
    refusal = CapacityExceeded("planted") if rng.random() < 0.05 else None
    return Script(
        tokens=[*tokens, EOS],
        chunk=rng.choice((1, 1, 2, 5)),
        fault=fault,
        fault_after=rng.randrange(1, len(tokens) + 1),
        refusal=refusal,
    )


@pytest.mark.parametrize("seed", range(40))
async def test_random_walk(seed: int) -> None:
    """Each candidate ends once, streamed text equals the one-shot text, nothing stays open."""
    rng = random.Random(seed)
    scripts: dict[tuple[tuple[int, ...], int], Script] = {}

    def script(request: Any, number: int) -> Script:
        return scripts.setdefault((request.prompt_token_ids, number), random_script(rng))

    service, backend = service_of(script)

    async def one(number: int) -> None:
        sampling = {
            "n": rng.randrange(1, 4),
            "max_tokens": rng.randrange(1, 40),
            "stop": tuple(rng.sample(["a\n", "CD", "lloh", "\U0001f600", "DEFABC"], rng.randrange(3))),
            "include_stop_str_in_output": rng.random() < 0.3,
        }
        wanted = call([(5, number), (6, number)], every_token=rng.random() < 0.3, **sampling)
        generation = service.generate(wanted)
        close_after = rng.randrange(1, 8) if rng.random() < 0.2 else None
        seen: dict[int, list[Delta]] = {}
        failed = False
        try:
            await generation.admitted()
            async for deltas in slow_reader(generation, rng):
                for delta in deltas:
                    seen.setdefault(delta.index, []).append(delta)
                close_after = None if close_after is None else close_after - 1
                if close_after == 0:
                    generation.close()
        except NoriError:
            failed = True
        again = service.generate(wanted)
        try:
            expected = await again.result()
        except NoriError:
            assert failed
            return
        for delta in expected:
            got = seen.get(delta.index, [])
            ends = [item.finish_reason for item in got if item.finish_reason]
            assert delta.text.startswith(text_of(got))
            assert len(ends) <= 1
            if not failed:
                assert ends == [delta.finish_reason]
                assert got[-1].finish_reason
                assert (text_of(got), got[-1].stop_reason) == (delta.text, delta.stop_reason)
                assert [id_ for item in got for id_ in item.token_ids] == delta.token_ids
        if not failed:
            assert generation.usage == again.usage

    await asyncio.gather(*(one(number) for number in range(8)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not backend.open
    assert service.running == 0
    assert service.metrics.model("smol").running == 0
    await asyncio.wait_for(service.idle(), 1)
