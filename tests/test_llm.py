"""The Python API on a tiny model: outputs, stop rules, seeds, many prompts, and arguments refused with clear errors."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.checkpoints import make_tiny_llama
from transformers import LlamaForCausalLM

from nori_cluster import LLM, SamplingParams
from nori_cluster.errors import ClientError, ConfigError, ContextLengthExceeded, NoriError

pytestmark = pytest.mark.contract
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llm") / "tiny")


def load(folder: Path, **changes: Any) -> LLM:
    settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 128, "device": "cpu", "threads": 1} | changes
    return LLM(str(folder), **settings)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return load(folder)


def test_greedy_equals_the_reference_library(llm: LLM, folder: Path) -> None:
    prompts = [[5, 6, 7], list(range(10, 60)), [300]]
    outputs = llm.generate(prompts, GREEDY)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert list(output.outputs[0].token_ids) == expected[0, len(prompt) :].tolist()
        assert output.prompt_token_ids == tuple(prompt)
        assert output.prompt is None
        assert output.outputs[0].finish_reason == "length"


def test_text_in_text_out(llm: LLM) -> None:
    (output,) = llm.generate("The capital of France", GREEDY)
    assert output.prompt == "The capital of France"
    assert output.prompt_token_ids == tuple(llm.tokenizer.encode("The capital of France"))
    assert output.outputs[0].text == llm.tokenizer.decode(list(output.outputs[0].token_ids))


def test_forms_of_prompts(llm: LLM) -> None:
    one = llm.generate([5, 6, 7], GREEDY)[0].outputs
    assert llm.generate([[5, 6, 7]], GREEDY)[0].outputs == one
    assert llm.generate((np.array([5, 6, 7]),), GREEDY)[0].outputs == one
    assert [len(o.outputs) for o in llm.generate(["a", [5], "b"], GREEDY)] == [1, 1, 1]


def test_more_prompts_than_slots_and_blocks(folder: Path) -> None:
    """Queueing, chunking and preemption change nothing: the same tokens as alone."""
    small = load(folder, max_num_seqs=3, num_blocks=8, max_num_batched_tokens=16)
    prompts = [list(range(5, 5 + length)) for length in (1, 40, 17, 33, 2, 64, 16, 30)]
    alone = [small.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    assert [o.outputs[0].token_ids for o in small.generate(prompts, GREEDY)] == alone


def test_seeds_and_candidates(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=12, ignore_eos=True)
    first, second = llm.generate([[5, 6]] * 2, params)
    assert first.outputs == second.outputs
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert len({o.token_ids for o in first.outputs}) == 3
    assert llm.generate([[9] * 50, [5, 6]], params)[1].outputs == first.outputs
    other = SamplingParams(n=3, seed=8, max_tokens=12, ignore_eos=True)
    assert llm.generate([5, 6], other)[0].outputs != first.outputs
    drawn = SamplingParams(max_tokens=12, ignore_eos=True)
    assert llm.generate([5, 6], drawn)[0].outputs != llm.generate([5, 6], drawn)[0].outputs


def test_params_per_prompt(llm: LLM) -> None:
    outputs = llm.generate([[5], [5]], [GREEDY, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [20, 3]


def test_stop_strings_end_the_text_and_free_the_sequence(llm: LLM) -> None:
    whole = llm.generate([5, 6, 7], GREEDY)[0].outputs[0]
    text = whole.text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=(stop,)))
    (output,) = cut[0].outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == text[: text.index(stop)]
    assert whole.token_ids[: len(output.token_ids)] == output.token_ids
    kept = SamplingParams(temperature=0.0, max_tokens=20, stop=stop, include_stop_str_in_output=True, ignore_eos=True)
    assert llm.generate([5, 6, 7], kept)[0].outputs[0].text == text[: text.index(stop)] + stop  # one string will do
    assert not llm._core.has_work
    assert llm._core.scheduler.pool.free == 128


def test_stop_token_ids_and_eos(llm: LLM) -> None:
    whole = llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=(whole[4],))
    (output,) = llm.generate([5, 6, 7], params)[0].outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", whole[4])
    assert output.token_ids == whole[: whole.index(whole[4]) + 1]
    certain = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={2: 100.0})
    (output,) = llm.generate([5], certain)[0].outputs
    assert (output.finish_reason, output.stop_reason, output.text, output.token_ids) == ("stop", None, "", (2,))


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, ignore_eos=True)
    plain, asked = llm.generate([[5, 6], [5, 6]], [GREEDY, params])
    assert plain.outputs[0].logprobs is None
    logprobs = asked.outputs[0].logprobs
    assert logprobs is not None
    assert len(logprobs) == 4
    for token, entry in zip(asked.outputs[0].token_ids, logprobs, strict=True):
        assert entry.top_ids[0] == token
        assert entry.logprob == entry.top_logprobs[0] < 0
        assert len(entry.top_ids) == 3


@pytest.mark.parametrize("prompts", ["", [""], [], [[]], [[5], []], [-1], [384], [2**31], [[5], [5279552648203111001]]])
def test_f14_f15_bad_prompts_are_refused_and_the_next_ones_served(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ClientError):
        llm.generate(prompts, GREEDY)
    assert len(llm.generate([5], GREEDY)[0].outputs[0].token_ids) == 20


@pytest.mark.parametrize("prompts", [[5.5], [True], [[5, "1"]], [None], 7, [{"prompt": "x"}], [[True, False]]])
def test_f15_prompts_of_wrong_type(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ClientError, match="a prompt is a string or a list of token ids"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n must"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"stop": (3,)}, "stop"),
        ({"stop_token_ids": (384,)}, "vocabulary"),
        ({"logit_bias": {384: 1.0}}, "logit_bias"),
        ({"logprobs": 1000}, "logprobs"),
    ],
)
def test_bad_parameters_are_named(llm: LLM, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ClientError, match=named):
        llm.generate([5], SamplingParams(**changes))


def test_other_refusals(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded):
        llm.generate([5] * 512, GREEDY)
    with pytest.raises(ContextLengthExceeded, match="you requested 513 tokens"):
        llm.generate([5] * 500, SamplingParams(max_tokens=13))
    with pytest.raises(ClientError, match="2 sampling_params for 1 prompts"):
        llm.generate([5], [GREEDY, GREEDY])
    with pytest.raises(ClientError, match="must be SamplingParams"):
        llm.generate([[5]], [{"temperature": 0}])  # type: ignore[list-item]
    assert len(llm.generate([5] * 500, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": 5}, "dtype"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"device": "tpu"}, "tpu"),
        ({"max_model_len": 10_000}, "max_model_len"),
        ({"num_blocks": None, "kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes"),
    ],
)
def test_bad_arguments_of_the_constructor(folder: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(folder, **changes)


def test_models_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(NoriError):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="model must be"):
        LLM("")


def test_an_interrupt_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = llm._core.executor.worker.execute  # type: ignore[attr-defined]
    calls = iter(range(100))

    def interrupted(plan: Any) -> Any:
        if next(calls) == 3:
            monkeypatch.undo()
            result = execute(plan)
            llm._core.executor._results.append(result)  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return execute(plan)

    monkeypatch.setattr(llm._core.executor.worker, "execute", interrupted)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]], GREEDY)
    assert not llm._core.has_work
    assert len(llm.generate([5], GREEDY)[0].outputs[0].token_ids) == 20


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, nori_cluster; from nori_cluster import SamplingParams; assert 'torch' not in sys.modules; "
        "from nori_cluster import LLM; "
        "assert not {'ray', 'fastapi', 'grpc', 'sqlalchemy', 'transformers'} & set(sys.modules), 'too much'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ImportError):
        from nori_cluster import Nothing  # type: ignore[attr-defined]  # noqa: F401
