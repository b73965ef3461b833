"""The one table of request fields that are not served yet, and of those that change nothing we do.

Anything else that is not in the endpoint's schema is unknown: accepted, and named in `x-nori-ignored-fields`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from nori_cluster.errors import UnsupportedParameter

# Only billing, storage, tracing or pacing: accepted, nothing to honour.
NEUTRAL = frozenset(
    {
        "user", "safety_identifier", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention",
        "request_id", "rid", "session_id", "parallel_tool_calls", "include_reasoning", "separate_reasoning",
        "stream_reasoning", "stream_interval",
    }
)  # fmt: skip

# Known, planned. Field → values that ask for nothing (null always does).
PLANNED: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "logprob_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "spaces_between_special_tokens": (True,),
    "return_prompt_text": (False,),
    "return_weight_versions": (False,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "custom_params": ({},),
    "repetition_detection": (),
    "suffix": ("",),
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "no_stop_trim": (False,),
    "lora_path": (),
}


def check_fields(body: Mapping[str, Any], served: Collection[str]) -> list[str]:
    """Names of unknown fields. Raises UnsupportedParameter for a planned field that asks for something."""
    unknown = []
    for name, value in body.items():
        if name in served or name in NEUTRAL:
            continue
        if name not in PLANNED:
            unknown.append(name)
        elif value is not None and not any(_same(value, no_op) for no_op in PLANNED[name]):
            raise UnsupportedParameter(f"{name} is planned, but not supported yet", param=name)
    return unknown


def _same(value: Any, no_op: Any) -> bool:
    return bool(value == no_op) and isinstance(value, bool) == isinstance(no_op, bool)
