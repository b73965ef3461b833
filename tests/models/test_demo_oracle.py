"""The demo model in float32: 16 prompts × 64 greedy tokens, token for token as the reference library; bf16 beside it.

Near ties are judged as DESIGN §6.2 says: at the first difference both tokens' logits must lie within 1e-3.
"""

from pathlib import Path

import pytest
import torch
from fakes.stepping import Driver, group_config, load_worker, sequence_logits
from transformers import LlamaForCausalLM

from nori_cluster.checkpoint.source import resolve
from nori_cluster.errors import NoriError
from nori_cluster.frontend.tokenizer import Tokenizer

pytestmark = pytest.mark.contract
TOKENS = 64
NEAR_TIE = 1e-3
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 5, 8, 13,",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs ice cold?<|im_end|>\n<|im_start|>assistant\n",
    "Les trois mousquetaires sont",
    "Water boils at",
    "SELECT name, age FROM users WHERE",
    "The three laws of thermodynamics state that energy cannot be created or destroyed, that entropy",
    "Q: How many legs does a spider have?\nA:",
    "{\"name\": \"Ada\", \"year\":",
    "東京は",
    "A",
    "Photosynthesis is the process by which plants turn light into chemical energy. " * 8 + "In short,",
]  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> Path:
    try:
        return resolve("smollm2-135m")
    except NoriError as error:
        pytest.skip(f"the demo model cannot be had here: {error}")


@pytest.fixture(scope="module")
def prompts(demo: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_folder(demo)
    return [tokenizer.encode(text, parse_special=True) for text in PROMPTS]


def reference_greedy(model: LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts in one left-padded batch; eos does not stop it, as the worker does not stop either."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out[:, longest:].tolist()


def test_greedy_equals_the_reference_library(demo: Path, prompts: list[list[int]]) -> None:
    torch.set_num_threads(2)
    model = LlamaForCausalLM.from_pretrained(demo, dtype=torch.float32).eval()
    expected = reference_greedy(model, prompts)
    worker = load_worker(group_config(demo, num_blocks=400, threads=2))
    driver = Driver(worker)
    for slot, prompt in enumerate(prompts):
        driver.start(slot, prompt)
    found = driver.generate(range(len(prompts)), TOKENS)
    ties = 0
    for slot, (prompt, theirs) in enumerate(zip(prompts, expected, strict=True)):
        ours = found[slot]
        first = next((i for i in range(TOKENS) if ours[i] != theirs[i]), None)
        if first is None:
            continue
        ties += 1
        with torch.no_grad():
            logits = model(torch.tensor([prompt + theirs[:first]])).logits[0, -1]
        gap = float((logits[ours[first]] - logits[theirs[first]]).abs())
        assert gap < NEAR_TIE, f"{PROMPTS[slot]!r}: token {first} is {ours[first]}, not {theirs[first]} (gap {gap:.4f})"
    assert ties <= 2


def test_bfloat16_is_as_close_as_the_reference_library(demo: Path, prompts: list[list[int]]) -> None:
    """bf16 arithmetic errs against float32 no more than the reference library's own bf16, about 4 % here."""
    torch.set_num_threads(2)
    exact = load_worker(group_config(demo, num_blocks=20, threads=2))
    rounded = load_worker(group_config(demo, dtype="bfloat16", num_blocks=20, threads=2))
    model = LlamaForCausalLM.from_pretrained(demo, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ours = theirs = norm = 0.0
    agree = total = 0
    for prompt in prompts[-8:]:
        truth, found = sequence_logits(exact, prompt), sequence_logits(rounded, prompt)
        with torch.no_grad():
            reference = model(torch.tensor([prompt])).logits[0].float()
        ours += float((found - truth).square().sum())
        theirs += float((reference - truth).square().sum())
        norm += float(truth.square().sum())
        agree += int((truth.argmax(-1) == found.argmax(-1)).sum())
        total += len(prompt)
    assert ours < 1.5 * theirs < 0.01 * norm
    assert agree / total > 0.9
