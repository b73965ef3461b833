"""Attention backends by name. A backend turns a ForwardBatch into a plan once per step and runs it once per layer."""

from nori_cluster.registry import Registry

ATTENTION = Registry(
    "attention backend",
    {
        "cpu_invariant": "nori_cluster.attention.cpu_invariant:CpuInvariantAttention",
        "cpu_paged": "nori_cluster.attention.cpu_paged:CpuPagedAttention",
        "reference": "nori_cluster.attention.reference:ReferenceAttention",
        "triton_paged": "nori_cluster.attention.triton_paged:TritonPagedAttention",
    },
)
