"""Model architectures by the name config.json gives them."""

from typing import Any

from nori_cluster.errors import ConfigError
from nori_cluster.registry import Registry

REFUSED = {
    "GptOssForCausalLM": "attention sinks and MXFP4 experts",
    "DeepseekV2ForCausalLM": "multi-head latent attention",
    "DeepseekV3ForCausalLM": "multi-head latent attention",
    "Gemma3ForConditionalGeneration": "images; the text model Gemma3ForCausalLM is served",
    "Mistral3ForConditionalGeneration": "images",
    "LlavaForConditionalGeneration": "images",
    "Qwen2VLForConditionalGeneration": "images",
    "Qwen2_5_VLForConditionalGeneration": "images",
    "Qwen3VLForConditionalGeneration": "images",
    "MllamaForConditionalGeneration": "images",
    "Llama4ForConditionalGeneration": "images",
}


class Models(Registry):
    """Architectures known but not served are refused with what is missing for them."""

    def require(self, name: str) -> None:
        """ConfigError with what is supported, unless the architecture is served. Imports no model."""
        supported = ", ".join(sorted(self))
        if name in REFUSED:
            raise ConfigError(f"{self.kind} {name!r} is not served ({REFUSED[name]}); supported: {supported}")
        if name not in self:
            raise ConfigError(f"unknown {self.kind} {name!r:.80}; supported: {supported}")

    def __getitem__(self, name: str) -> Any:
        self.require(name)
        return super().__getitem__(name)


MODELS = Models(
    "model architecture",
    {
        "Gemma2ForCausalLM": "nori_cluster.models.gemma:Gemma2",
        "Gemma3ForCausalLM": "nori_cluster.models.gemma:Gemma3",
        "GraniteForCausalLM": "nori_cluster.models.granite:Granite",
        "LlamaForCausalLM": "nori_cluster.models.llama:Llama",
        "MistralForCausalLM": "nori_cluster.models.mistral:Mistral",
        "MixtralForCausalLM": "nori_cluster.models.mixtral:Mixtral",
        "Olmo2ForCausalLM": "nori_cluster.models.olmo2:Olmo2",
        "Phi3ForCausalLM": "nori_cluster.models.phi3:Phi3",
        "Qwen2ForCausalLM": "nori_cluster.models.qwen:Qwen2",
        "Qwen3ForCausalLM": "nori_cluster.models.qwen:Qwen3",
        "Qwen3MoeForCausalLM": "nori_cluster.models.qwen:Qwen3Moe",
        "SmolLM3ForCausalLM": "nori_cluster.models.smollm3:SmolLM3",
    },
)
