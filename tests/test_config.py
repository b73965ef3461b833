"""What "auto" becomes."""

import pytest

from nori_cluster.config import SchedulerConfig, resolve_device
from nori_cluster.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("device", "gpus", "workers", "resolved"),
    [("auto", 0, 4, "cpu"), ("auto", 8, 4, "cuda"), ("cpu", 8, 16, "cpu"), ("cuda", 2, 2, "cuda")],
)
def test_device(device: str, gpus: int, workers: int, resolved: str) -> None:
    assert resolve_device(device, gpus, workers) == resolved


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 0), ("auto", 1)])
def test_too_few_gpus_are_refused_and_not_waited_for(device: str, gpus: int) -> None:
    with pytest.raises(ConfigError, match=f"2 workers need 2 GPUs and this machine has {gpus}"):
        resolve_device(device, gpus, 2)


@pytest.mark.parametrize(("device", "tokens", "depth"), [("cpu", 256, 1), ("cuda", 8192, 2)])
def test_a_step_is_as_large_as_the_device_makes_good_use_of(device: str, tokens: int, depth: int) -> None:
    open_config = SchedulerConfig().resolve(device)
    assert (open_config.step_tokens, open_config.depth) == (tokens, depth)
    fixed = SchedulerConfig(max_num_batched_tokens=640, depth=2)
    assert fixed.resolve(device) == fixed
