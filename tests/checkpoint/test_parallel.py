"""validate_parallel: F35's table, in numbers a newcomer can act on."""

import msgspec
import pytest

from nori_cluster.checkpoint.hf_config import CheckpointConfig
from nori_cluster.checkpoint.parallel import validate_parallel
from nori_cluster.errors import ConfigError

pytestmark = pytest.mark.unit


def shape(heads: int, kv_heads: int, hidden: int = 576, inner: int = 1536, head_dim: int = 64) -> CheckpointConfig:
    return CheckpointConfig(
        architecture="LlamaForCausalLM",
        raw={},
        vocab_size=131,
        max_position_embeddings=256,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=1,
        hidden_size=hidden,
        intermediate_size=inner,
        head_dim=head_dim,
        eos_token_ids=(2,),
        tie_word_embeddings=False,
        torch_dtype="float32",
    )


@pytest.mark.parametrize(
    ("config", "works"),
    [
        (shape(9, 3), {1, 3}),
        (shape(8, 2), {1, 2}),
        (shape(8, 8, inner=250), {1, 2}),
        (shape(8, 2, hidden=100, head_dim=24), {1, 2}),
        (shape(32, 8, inner=14336), {1, 2, 4, 8}),
    ],
)
def test_f35_sizes(config: CheckpointConfig, works: set[int]) -> None:
    for size in range(1, 17):
        if size in works:
            validate_parallel(config, size)
        else:
            with pytest.raises(ConfigError, match=f"sizes that work: {', '.join(map(str, sorted(works)))}"):
                validate_parallel(config, size)


def test_f35_names_the_numbers() -> None:
    with pytest.raises(ConfigError, match="9 attention heads cannot be split over 2"):
        validate_parallel(shape(9, 3), 2)
    with pytest.raises(ConfigError, match="250 intermediate columns cannot be split over 4"):
        validate_parallel(shape(8, 8, inner=250), 4)
    with pytest.raises(ConfigError, match="2 KV heads cannot be split over 4"):
        validate_parallel(shape(8, 2), 4)


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one(size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        validate_parallel(shape(9, 3), size)


def test_an_expert_must_split_too() -> None:
    config = msgspec.structs.replace(shape(32, 8), raw={"moe_intermediate_size": 770})
    validate_parallel(config, 2)
    with pytest.raises(ConfigError, match=r"770 columns of an expert cannot be split over 4 \(sizes that work: 1, 2\)"):
        validate_parallel(config, 4)
