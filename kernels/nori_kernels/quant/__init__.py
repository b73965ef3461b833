"""Quantized products: the layouts of docs/quant_layouts.md, and kernels that multiply with them."""
