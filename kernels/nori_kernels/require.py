"""What a wrapper asks of a tensor before a launch: past its end a kernel reads other memory without a word."""

import torch


def require(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """ValueError unless of `shape`, of one of `dtypes` (none: any) and with contiguous rows."""
    apart = tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1
    if tuple(tensor.shape) != shape or apart or (dtypes and tensor.dtype not in dtypes):
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} must be {list(shape)}{f' of {kinds}' if kinds else ''} with contiguous rows, "
            f"not {list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')} with strides {tensor.stride()}"
        )
