"""Checkpoint formats (AWQ, GPTQ, round to nearest) → the one layout that weight_gemm reads: docs/quant_layouts.md."""

from dataclasses import dataclass

import torch

RUN = 64  # columns whose 4-bit values share 32 bytes: byte i holds column i (low) and column i + 32 (high)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ: nibble i of a word is column AWQ_ORDER[i] of its eight


@dataclass(frozen=True)
class PackedWeight:
    """w[n, k] = (q[n, k] - zero[n, g]) · scale[n, g], g = k // group, logically [rows, columns].

    q: uint8 [rows, ⌈columns / 64⌉ · 64 · bits / 8]. zero uint8 and scale float: [rows, ⌈columns / group⌉].
    order: None, or int64 [columns]: column k of the layout multiplies x[:, order[k]].
    """

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    bits: int
    group: int
    columns: int
    order: torch.Tensor | None = None

    def dense(self) -> torch.Tensor:
        """float64 [rows, columns] in the order of x; the definition of the layout."""
        values = unpack(self.q, self.bits)[:, : self.columns].double()
        groups = torch.arange(self.columns, device=self.q.device) // self.group
        w = (values - self.zero.double()[:, groups]) * self.scale.double()[:, groups]
        if self.order is None:
            return w
        result = torch.empty_like(w)
        result[:, self.order] = w
        return result


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """integers [rows, columns], 0 ≤ v < 2^bits → q; columns are filled up with zeros to whole runs."""
    padded = torch.nn.functional.pad(values.to(torch.uint8), (0, -values.shape[1] % RUN))
    if bits == 8:
        return padded.contiguous()
    runs = padded.unflatten(1, (-1, 2, RUN // 2))
    return (runs[:, :, 0] | (runs[:, :, 1] << 4)).flatten(1).contiguous()


def unpack(q: torch.Tensor, bits: int) -> torch.Tensor:
    """q → uint8 [rows, columns in whole runs]."""
    if bits == 8:
        return q
    runs = q.unflatten(1, (-1, RUN // 2))
    return torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)


def round_to_nearest(w: torch.Tensor, bits: int, group: int, symmetric: bool = False) -> PackedWeight:
    """w [rows, columns] → nearest values of each group's even grid. symmetric: zero is the middle of the range."""
    _check(bits, group)
    columns = w.shape[1]
    top = 2**bits - 1
    padded = torch.nn.functional.pad(w.double(), (0, -columns % group)).unflatten(1, (-1, group))
    if symmetric:
        scale = padded.abs().amax(-1) / (top // 2)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale)).float()
        zero = torch.full_like(scale, top // 2 + 1)
    else:
        low, high = padded.amin(-1).clamp_max(0), padded.amax(-1).clamp_min(0)
        scale = torch.where(high > low, (high - low) / top, torch.ones_like(high)).float()
        zero = (-low / scale).round()
    q = (padded / scale.double()[..., None] + zero[..., None]).round().clamp(0, top)
    return PackedWeight(pack(q.flatten(1)[:, :columns], bits), scale, zero.to(torch.uint8), bits, group, columns)


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group: int) -> PackedWeight:
    """AWQ, 4 bits: qweight int32 [columns, rows / 8], qzeros int32 [groups, rows / 8], scales [groups, rows]."""
    _check(4, group)
    order = torch.tensor(AWQ_ORDER, device=qweight.device).argsort()
    q, zero = (_words(t, 4).unflatten(1, (-1, 8))[:, :, order].flatten(1) for t in (qweight, qzeros))
    return PackedWeight(pack(q.T, 4), scales.T.contiguous(), zero.T.contiguous(), 4, group, len(qweight))


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    group: int,
    g_idx: torch.Tensor | None = None,
    plus_one: bool = True,
) -> PackedWeight:
    """GPTQ: qweight int32 [columns · bits / 32, rows], qzeros int32 [groups, rows · bits / 32], scales [groups, rows].

    g_idx int [columns]: the group of each column (desc_act). plus_one: zeros are stored less one (format v1, not v2).
    ValueError where g_idx does not give every group `group` columns.
    """
    _check(bits, group)
    q = _words(qweight.T, bits)
    zero = (_words(qzeros, bits) + int(plus_one)).T
    order = None
    columns = q.shape[1]
    places = torch.arange(columns, device=q.device) // group
    if g_idx is not None and not torch.equal(g_idx.long(), places):
        order = g_idx.long().argsort(stable=True)
        if not torch.equal(g_idx.long()[order], places):
            raise ValueError(f"g_idx does not give every group {group} columns")
        q = q[:, order]
    if int(zero.max()) > 255:
        raise ValueError("a zero point of 256 does not fit the layout")
    return PackedWeight(
        pack(q, bits), scales.T.contiguous(), zero.to(torch.uint8).contiguous(), bits, group, columns, order
    )


def _words(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, m] → int64 [n, m · 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=packed.device)
    return ((packed.long()[..., None] >> shifts) & (2**bits - 1)).flatten(1)


def _check(bits: int, group: int) -> None:
    if bits not in (4, 8) or group < 32 or group % 32:
        raise ValueError(f"weights have 4 or 8 bits and groups of a multiple of 32, not {bits} bits and {group}")
