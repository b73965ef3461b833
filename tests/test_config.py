"""What "auto" becomes."""

import pytest

from nori_cluster.config import resolve_device
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
