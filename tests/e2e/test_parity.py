"""Tensor parallelism changes nothing that can be seen: the served tiny model at TP 2 against one in-process worker."""

from pathlib import Path

import httpx
import pytest
from e2e.test_cluster import PROMPT_IDS, complete

from nori_cluster.llm import LLM
from nori_cluster.types import SamplingParams

pytestmark = pytest.mark.e2e


def test_tp_2_says_what_tp_1_says(http: httpx.Client, tiny_folder: Path) -> None:
    served = complete(http, return_token_ids=True, max_tokens=32)["choices"][0]["token_ids"]
    llm = LLM(str(tiny_folder), dtype="float32", max_num_seqs=2)
    (alone,) = llm.generate([PROMPT_IDS], SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
    assert served == list(alone.outputs[0].token_ids)
