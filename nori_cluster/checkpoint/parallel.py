"""Whether a model can be split over a number of ranks; asked by launch before anything starts."""

from nori_cluster.checkpoint.hf_config import CheckpointConfig
from nori_cluster.errors import ConfigError


def validate_parallel(config: CheckpointConfig, tp: int) -> None:
    """ConfigError naming the numbers and the sizes that work. (The vocabulary is padded and always fits.)"""
    parts = {
        "attention heads": config.num_attention_heads,
        "KV heads": config.num_key_value_heads,
        "intermediate columns": config.intermediate_size,
    }
    if type(inner := config.raw.get("moe_intermediate_size")) is int:
        parts["columns of an expert"] = inner
    if tp < 1:
        raise ConfigError(f"tensor parallel size must be at least 1, not {tp}", param="tensor_parallel_size")
    works = [size for size in range(1, config.num_key_value_heads + 1) if not any(n % size for n in parts.values())]
    if tp in works:
        return
    fails = [f"{count} {what} cannot be split over {tp}" for what, count in parts.items() if count % tp]
    raise ConfigError(
        f"tensor parallel size {tp}: {'; '.join(fails)} (sizes that work: {', '.join(map(str, works))})",
        param="tensor_parallel_size",
    )
