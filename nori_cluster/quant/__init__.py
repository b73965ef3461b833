"""Quantization methods by name: how a linear layer stores its weight and multiplies with it."""

from nori_cluster.registry import Registry

QUANT = Registry("quantization", {"none": "nori_cluster.quant.none:Unquantized"})
