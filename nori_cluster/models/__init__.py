"""Model architectures by the name config.json gives them."""

from nori_cluster.registry import Registry

MODELS = Registry("model architecture", {"LlamaForCausalLM": "nori_cluster.models.llama:Llama"})
