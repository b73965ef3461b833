"""Every attention backend against an independent dense computation, over a grid of shapes and mixtures of rows."""

import numpy as np
import pytest
import torch

from nori_cluster.attention import ATTENTION
from nori_cluster.attention.base import AttentionPattern
from nori_cluster.device.forward import ForwardBatch
from nori_cluster.device.kv_cache import KVCache

pytestmark = pytest.mark.contract
CPU = torch.device("cpu")
BLOCK, DIM, LAYERS = 16, 16, 2


class Rows:
    """Sequences with random K and V whose blocks lie scattered in a pool; every other block is full of NaN."""

    def __init__(self, shapes: list[tuple[int, int]], kv_heads: int, heads: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        rng = np.random.default_rng(1)
        self.shapes = shapes  # (prefix, new tokens) per row
        needed = [-(-(prefix + new) // BLOCK) for prefix, new in shapes]
        order = rng.permutation(sum(needed) + 5).astype(np.int32)
        self.cache = KVCache(len(order), LAYERS, kv_heads, BLOCK, DIM, dtype, CPU)
        self.cache.tensor.fill_(float("nan"))
        self.cache.clear(order[: sum(needed)])
        self.tables = np.zeros((len(shapes), max(needed)), np.int32)
        taken = 0
        for row, count in enumerate(needed):
            self.tables[row, :count] = order[taken : taken + count]
            taken += count
        self.k = [torch.randn(a + b, kv_heads, DIM, generator=generator).to(dtype) for a, b in shapes]
        self.v = [torch.randn(a + b, kv_heads, DIM, generator=generator).to(dtype) for a, b in shapes]
        self.q = [torch.randn(b, heads, DIM, generator=generator).to(dtype) for _, b in shapes]

    def slots(self, row: int, positions: np.ndarray) -> np.ndarray:
        return self.tables[row, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK

    def batch(self) -> ForwardBatch:
        counts = np.array([new for _, new in self.shapes])
        positions = [np.arange(prefix, prefix + new) for prefix, new in self.shapes]
        slots = [self.slots(row, where) for row, where in enumerate(positions)]
        tokens = torch.zeros(int(counts.sum()), dtype=torch.int64)
        return ForwardBatch(
            token_ids=tokens,
            positions=torch.from_numpy(np.concatenate(positions)),
            slot_mapping=torch.from_numpy(np.concatenate(slots)),
            query_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            context_lens=np.array([a + b for a, b in self.shapes], np.int32),
            block_tables=self.tables,
            sample_rows=np.arange(0),
            sample_places=np.arange(0),
            sample_tokens=tokens[:0],
        )

    def write_prefixes(self, layer: int) -> None:
        for row, (prefix, _) in enumerate(self.shapes):
            slots = torch.from_numpy(self.slots(row, np.arange(prefix)))
            view = self.cache.layer(layer)
            view[:, 0][slots // BLOCK, :, slots % BLOCK] = self.k[row][:prefix]
            view[:, 1][slots // BLOCK, :, slots % BLOCK] = self.v[row][:prefix]

    def new(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part[prefix:] for part, (prefix, _) in zip(parts, self.shapes, strict=True)])

    def dense(self, scale: float, pattern: AttentionPattern = AttentionPattern()) -> torch.Tensor:
        """Attention by its definition, in float64, without any paging."""
        out = []
        for q, k, v, (prefix, new) in zip(self.q, self.k, self.v, self.shapes, strict=True):
            repeat = q.shape[1] // k.shape[1]
            keys, values = k.double().repeat_interleave(repeat, 1), v.double().repeat_interleave(repeat, 1)
            scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
            if pattern.softcap:
                scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
            behind = torch.arange(prefix, prefix + new)[:, None] - torch.arange(prefix + new)[None, :]
            hidden = (behind < 0) | (behind >= (pattern.window or prefix + new))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(out)


MIXTURES = {
    "one decode": [(0, 1)],
    "decode block edges": [(14, 1), (15, 1), (16, 1), (31, 1)],
    "one long among short": [(3, 1), (700, 1), (5, 1), (90, 1)],
    "prefill": [(0, 17), (0, 2), (0, 64)],
    "chunk over a prefix": [(33, 15), (16, 16), (5, 40)],
    "mixed": [(20, 1), (0, 23), (130, 1), (48, 9), (0, 1)],
}


@pytest.mark.parametrize("name", sorted(ATTENTION))
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_dense_attention(name: str, mixture: str, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    rows = Rows(MIXTURES[mixture], kv_heads, heads, dtype)
    scale = 0.3
    backend = ATTENTION[name](rows.cache, heads, scale)
    assert backend.supports(CPU, dtype, DIM)
    rows.write_prefixes(1)
    plan = backend.plan(rows.batch())
    out = backend.forward(1, torch.cat(rows.q), rows.new(rows.k), rows.new(rows.v), plan)
    expected = rows.dense(scale)
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error < (2e-6 if dtype == torch.float32 else 2e-2)


PATTERNS = {
    "window 1": AttentionPattern(window=1),
    "window within a block": AttentionPattern(window=7),
    "window of blocks": AttentionPattern(window=32),
    "window over splits": AttentionPattern(window=150),
    "soft cap": AttentionPattern(softcap=0.7),
    "both": AttentionPattern(window=20, softcap=0.5),
}


@pytest.mark.parametrize("name", sorted(ATTENTION))
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_windows_and_soft_caps_of_single_layers(name: str, mixture: str, pattern: str) -> None:
    """Layer 0 has the pattern, layer 1 sees everything."""
    rows = Rows(MIXTURES[mixture], 2, 6, torch.float32)
    backend = ATTENTION[name](rows.cache, 6, 0.3, [PATTERNS[pattern], AttentionPattern()])
    plan = backend.plan(rows.batch())
    for layer, expected in enumerate([rows.dense(0.3, PATTERNS[pattern]), rows.dense(0.3)]):
        rows.write_prefixes(layer)
        out = backend.forward(layer, torch.cat(rows.q), rows.new(rows.k), rows.new(rows.v), plan)
        assert (out.double() - expected).abs().max() / expected.abs().max() < 2e-6


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_transposed_inputs(name: str) -> None:
    """The model hands over views whose memory lies the other way round."""
    rows = Rows(MIXTURES["mixed"], 3, 9, torch.float32)
    backend = ATTENTION[name](rows.cache, 9, 0.25)
    rows.write_prefixes(0)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1).t().contiguous().t().view(x.shape)

    q, k, v = turned(torch.cat(rows.q)), turned(rows.new(rows.k)), turned(rows.new(rows.v))
    out = backend.forward(0, q, k, v, backend.plan(rows.batch()))
    torch.testing.assert_close(out.double(), rows.dense(0.25), rtol=1e-5, atol=1e-5)


def placed(name: str, whole: Rows, prefix: int, new: int, beside: list[tuple[int, int]], at: int) -> torch.Tensor:
    """Result of tokens prefix : prefix + new of the one sequence in `whole`, as row `at` beside other sequences."""
    heads, kv_heads, dtype = whole.q[0].shape[1], whole.cache.num_kv_heads, whole.q[0].dtype
    rows = Rows([*beside[:at], (prefix, new), *beside[at:]], kv_heads, heads, dtype)
    end = prefix + new
    rows.k[at], rows.v[at], rows.q[at] = whole.k[0][:end], whole.v[0][:end], whole.q[0][prefix:end]
    rows.write_prefixes(1)
    backend = ATTENTION[name](rows.cache, heads, 0.3)
    out = backend.forward(1, torch.cat(rows.q), rows.new(rows.k), rows.new(rows.v), backend.plan(rows.batch()))
    first = sum(count for _, count in rows.shapes[:at])
    return out[first : first + new]


# The kernels claim no invariance, and 600 tokens in the interpreter take minutes.
@pytest.mark.parametrize("name", sorted(set(ATTENTION) - {"triton_paged"}))
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_backends_give_a_token_its_own_bits(
    name: str, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    """A sequence of 600 whole, and parts of it beside other sequences; the other backends show that this can fail."""
    rng = np.random.default_rng(0)
    whole = Rows([(0, 600)], kv_heads, heads, dtype)
    expected = placed(name, whole, 0, 600, [], 0)
    same = []
    for number in range(24):
        beside = [(int(rng.integers(0, 900)), int(rng.choice([1, 1, 30]))) for _ in range(int(rng.integers(0, 20)))]
        prefix = int(rng.integers(0, 599))
        new = 1 if number % 2 else int(rng.integers(1, min(600 - prefix, 200) + 1))
        part = placed(name, whole, prefix, new, beside, int(rng.integers(0, len(beside) + 1)))
        same.append(torch.equal(part, expected[prefix : prefix + new]))
    if ATTENTION[name].batch_invariant:
        assert all(same)
    elif name != "reference":
        assert not all(same)


def test_reference_in_float64_is_exact() -> None:
    rows = Rows(MIXTURES["mixed"], 2, 4, torch.float64)
    backend = ATTENTION["reference"](rows.cache, 4, 0.25)
    rows.write_prefixes(0)
    out = backend.forward(0, torch.cat(rows.q), rows.new(rows.k), rows.new(rows.v), backend.plan(rows.batch()))
    assert (out - rows.dense(0.25)).abs().max() < 1e-13


def test_cpu_paged_splits_buckets_that_outgrow_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nori_cluster.attention.cpu_paged.BUCKET_BYTES", 100_000)
    rows = Rows([(100, 1)] * 40, 3, 9, torch.float32)
    backend = ATTENTION["cpu_paged"](rows.cache, 9, 0.25)
    rows.write_prefixes(0)
    plan = backend.plan(rows.batch())
    assert len(plan.views[0].decode) > 1
    out = backend.forward(0, torch.cat(rows.q), rows.new(rows.k), rows.new(rows.v), plan)
    torch.testing.assert_close(out.double(), rows.dense(0.25), rtol=1e-5, atol=1e-5)


def test_layers_and_blocks_stay_apart() -> None:
    """A forward of layer 1 writes its own lines and nothing else."""
    rows = Rows([(0, 5), (20, 1)], 2, 4, torch.float32)
    before = rows.cache.tensor.clone()
    backend = ATTENTION["cpu_paged"](rows.cache, 4, 0.25)
    batch = rows.batch()
    backend.forward(1, torch.cat(rows.q), rows.new(rows.k), rows.new(rows.v), backend.plan(batch))
    changed = (rows.cache.tensor.nan_to_num() != before.nan_to_num()).nonzero()
    assert set(changed[:, 1].tolist()) == {1}
    slots = {(int(s) // BLOCK, int(s) % BLOCK) for s in batch.slot_mapping}
    assert {(int(block), int(token)) for block, _, _, _, token, _ in changed} == slots
