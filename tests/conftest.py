"""Kernels run in Triton's interpreter unless TRITON_INTERPRET=0 says that there is a GPU; read at import."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
