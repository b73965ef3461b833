"""Sampling controls through the Python API on a tiny model: F09, F10, F12, F13, F52 and what each control does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.checkpoints import make_tiny_llama
from transformers import LlamaForCausalLM

from nori_cluster import LLM, SamplingParams
from nori_cluster.errors import ClientError, ConfigError
from nori_cluster.types import Constraint, TokenLogprob

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llm") / "tiny")


def load(folder: Path, **changes: Any) -> LLM:
    settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 128, "device": "cpu", "threads": 1} | changes
    return LLM(str(folder), **settings)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return load(folder)


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | changes))


def reference(folder: Path, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), vocab]: log-softmax of the reference library."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 48])
def test_f13_prompt_logprobs_with_prefix_cache(llm: LLM, folder: Path, length: int) -> None:
    """Every reply has one entry per prompt token, equal to a reference forward pass, whatever is cached."""
    ids = list(range(100, 100 + length))
    expected = reference(folder, ids)
    for _ in range(2):
        for other in (ids, [*ids[:32], *range(200, 216)]):
            (output,) = llm.generate([other], greedy(max_tokens=1, prompt_logprobs=2))
            told = output.prompt_logprobs
            assert told is not None
            assert len(told) == len(other)
            assert told[0] is None
            if other is not ids:
                continue
            for position, entry in enumerate(told[1:]):
                assert entry is not None
                assert entry.logprob == pytest.approx(float(expected[position, ids[position + 1]]), abs=1e-3)
                assert len(entry.top_ids) == 2
                assert list(entry.top_ids) == expected[position].topk(2).indices.tolist()


def test_f10_only_the_prompt_is_looked_at(llm: LLM) -> None:
    scored, longer = llm.generate([[5, 6, 7]] * 2, [greedy(max_tokens=0, prompt_logprobs=1), greedy(prompt_logprobs=1)])
    (output,) = scored.outputs
    assert (output.token_ids, output.text, output.finish_reason) == ((), "", "length")
    assert scored.prompt_logprobs == longer.prompt_logprobs
    with pytest.raises(ClientError, match="max_tokens"):
        llm.generate([5], greedy(max_tokens=0))


def test_prompt_logprobs_belong_to_their_prompt(llm: LLM) -> None:
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    params = [greedy(prompt_logprobs=0, n=2), greedy(), greedy(prompt_logprobs=1)]
    outputs = llm.generate(prompts, params)
    assert [None if o.prompt_logprobs is None else len(o.prompt_logprobs) for o in outputs] == [3, None, 4]
    alone = [llm.generate([prompt], one)[0].prompt_logprobs for prompt, one in zip(prompts, params, strict=True)]
    for output, single in zip(outputs, alone, strict=True):
        assert [type(entry) for entry in output.prompt_logprobs or ()] == [type(entry) for entry in single or ()]
        for left, right in zip(output.prompt_logprobs or (), single or (), strict=True):
            if isinstance(left, TokenLogprob) and isinstance(right, TokenLogprob):
                assert left.logprob == pytest.approx(right.logprob, abs=1e-4)


def test_f09_min_tokens_holds_back_every_eos(folder: Path) -> None:
    llm = load(folder)
    (eos,) = llm.spec.eos_token_ids
    loud = {eos: 100.0, 7: 100.0}
    params = SamplingParams(temperature=0.0, min_tokens=4, max_tokens=8, logit_bias=loud, stop_token_ids=(7,))
    (output,) = llm.generate([5], params)[0].outputs
    assert len(output.token_ids) == 5
    assert not {eos, 7} & set(output.token_ids[:4])
    assert output.token_ids[4] in (eos, 7)
    assert output.finish_reason == "stop"


def test_f09_every_eos_of_the_generation_config(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    llm = load(folder)
    params = SamplingParams(temperature=0.0, min_tokens=4, max_tokens=8, logit_bias={0: 100.0, 2: 100.0})
    outputs = llm.generate([[5], [6]], [params, greedy()])
    ids = outputs[0].outputs[0].token_ids
    assert len(ids) == 5
    assert not {0, 2} & set(ids[:4])
    assert ids[4] in (0, 2)
    assert outputs[0].outputs[0].finish_reason == "stop"
    assert outputs[1].outputs[0].token_ids == llm.generate([[6]], greedy())[0].outputs[0].token_ids


def test_allowed_token_ids(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, allowed_token_ids=(40, 41), seed=1, ignore_eos=True)
    assert set(llm.generate([5], params)[0].outputs[0].token_ids) <= {40, 41}


def test_bad_words_do_not_appear(llm: LLM) -> None:
    whole = llm.generate([5, 6, 7], greedy(max_tokens=12))[0].outputs[0]
    word = llm.tokenizer.token_text(whole.token_ids[3])
    pair = whole.token_ids[4:6]
    kept = llm.generate([5, 6, 7], greedy(max_tokens=12, bad_words=(word,)))[0].outputs[0].token_ids
    assert not {tuple(kept[at : at + 1]) for at in range(12)} & {tuple(llm.tokenizer.encode(word, add_special=False))}
    kept = llm.generate([5, 6, 7], greedy(max_tokens=12, bad_word_ids=(pair,)))[0].outputs[0].token_ids
    assert pair not in {tuple(kept[at : at + 2]) for at in range(11)}


def test_penalties_change_the_output(llm: LLM) -> None:
    plain = llm.generate([5] * 3, greedy(max_tokens=30))[0].outputs[0].token_ids
    for changes in ({"repetition_penalty": 5.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        other = llm.generate([5] * 3, greedy(max_tokens=30, **changes))[0].outputs[0].token_ids
        assert len(set(other)) >= len(set(plain))


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 0.001},
        {"repetition_penalty": 100.0},
        {"temperature": 1e-30},
        {"min_p": 1.0},
        {"top_k": 10**7},
        {"top_p": 1e-9},
        {"logit_bias": dict.fromkeys(range(384), -100.0)},
    ],
)
def test_f12_extremes_stay_finite(llm: LLM, changes: dict[str, Any]) -> None:
    fields = {"max_tokens": 6, "logprobs": 2, "ignore_eos": True, "seed": 3} | changes
    outputs = llm.generate([[5, 6], [5, 6]], [SamplingParams(**fields), greedy(max_tokens=6)])
    assert len(outputs[0].outputs[0].token_ids) == 6
    assert all(entry.logprob <= 0 for entry in outputs[0].outputs[0].logprobs or ())
    assert outputs[1].outputs[0].token_ids == llm.generate([[5, 6]], greedy(max_tokens=6))[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (384,)}, "allowed_token_ids"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_word_ids": ((384,),)}, "bad_words"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_f12_bad_values_are_named(llm: LLM, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ClientError, match=named) as caught:
        llm.generate([5], greedy(**changes))
    assert caught.value.param == named


def test_keywords_of_the_constructor(folder: Path) -> None:
    for changes, named in (
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode"),
        ({"speculative_config": {"method": "medusa"}}, "speculative_config"),
        ({"speculative_config": "ngram"}, "speculative_config"),
        ({"batch_invariant": "yes"}, "batch_invariant"),
    ):
        with pytest.raises(ConfigError, match=named):
            load(folder, **changes)
    llm = load(folder, logprobs_mode="processed", speculative_config={"method": "ngram"}, max_logprobs=30)
    assert llm.config.numerics.logprobs_mode == "processed_logprobs"
    plain = SamplingParams(max_tokens=4, logprobs=30, temperature=0.5, top_k=1, ignore_eos=True)
    (output,) = llm.generate([5, 6], plain)[0].outputs
    assert [entry.logprob for entry in output.logprobs or ()] == [0.0] * 4


def test_speculation_changes_no_token_and_is_counted(folder: Path) -> None:
    prompt = [5, 6, 7, 8] * 6
    few = {"max_tokens": 40, "logprobs": 1, "ignore_eos": True, "allowed_token_ids": (40, 41)}  # much to look up
    params = [SamplingParams(temperature=0.0, **few), SamplingParams(seed=3, **few)]
    plain = load(folder).generate([prompt] * 2, params)
    drafted = load(folder, speculative_config={"method": "ngram"}).generate([prompt] * 2, params)
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert len(other.outputs[0].logprobs or ()) == 40
        assert [e.top_ids for e in one.outputs[0].logprobs or ()] == [
            e.top_ids for e in other.outputs[0].logprobs or ()
        ]
        assert other.outputs[0].proposed_drafts >= other.outputs[0].accepted_drafts > 0
        assert one.outputs[0].proposed_drafts == 0


@pytest.mark.parametrize("drafts", [None, {"method": "ngram"}])
def test_constraints_hold_and_bad_ones_are_refused(folder: Path, drafts: Any) -> None:
    llm = load(folder, speculative_config=drafts)
    regex = SamplingParams(max_tokens=40, seed=1, constraint=Constraint("regex", "(ab|cd){3}"))
    choice = SamplingParams(max_tokens=40, seed=2, constraint=Constraint("choice", '["yes","no"]'))
    free = greedy()
    first, second, third = llm.generate([[5, 6]] * 3, [regex, choice, free])
    assert re.fullmatch("(ab|cd){3}", first.outputs[0].text)
    assert second.outputs[0].text in ("yes", "no")
    assert (first.outputs[0].finish_reason, second.outputs[0].finish_reason) == ("stop", "stop")
    assert third.outputs == llm.generate([[5, 6]], free)[0].outputs
    for bad in (Constraint("regex", "["), Constraint("json_schema", '{"type": "banana"}')):
        with pytest.raises(ClientError, match="constraint"):
            llm.generate([5], SamplingParams(constraint=bad))
