"""Kernels run in Triton's interpreter unless TRITON_INTERPRET=0 says that a GPU is there; read when they are imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
