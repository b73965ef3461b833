"""How near quantized rows must be to their reference."""

import torch


def assert_quantized(out: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Scales equal to float32; values within one step, and nearly all of them equal."""
    q, scale = (t.double() for t in out)
    wanted, wanted_scale = (t.double() for t in expected)
    assert torch.allclose(scale, wanted_scale, rtol=1e-5, atol=1e-12)
    step = torch.ones_like(wanted) if out[0].dtype == torch.int8 else wanted.abs() / 8 + 2.0**-9
    assert ((q - wanted).abs() <= step).all()
    assert (q != wanted).double().mean() <= 0.02 + 1.5 / wanted.numel()
