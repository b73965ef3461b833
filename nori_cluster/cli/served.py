"""Whether this version serves a checkpoint's model, asked before Ray or a device is taken."""

from pathlib import Path

from nori_cluster.checkpoint.hf_config import read_architecture, read_config
from nori_cluster.models import MODELS
from nori_cluster.quant import QUANT


def require_architecture(folder: Path) -> None:
    """ConfigError with the list of what is served, unless config.json names one of it. Imports no model."""
    MODELS.require(read_architecture(folder))


def require_served(folder: Path) -> None:
    """Also CheckpointError naming the key of config.json that the model's family does not serve; imports torch."""
    require_architecture(folder)
    config = read_config(folder)
    MODELS[config.architecture].spec_from_hf(config)
    QUANT[(config.raw.get("quantization_config") or {}).get("quant_method", "none")]
