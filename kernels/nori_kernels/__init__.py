"""Triton kernels of Nori Cluster, each a float64 reference, a kernel and a wrapper: docs/kernels.md."""
