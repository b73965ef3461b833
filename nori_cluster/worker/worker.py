"""One rank of a group: applies plans in order to its SlotTable, runs the model, and on rank 0 samples.

plan → drops, starts, blocks → ForwardBatch → model → logits at rank 0 → ids to all ranks → SlotTable → StepResult.
"""

import logging
import os
from pathlib import Path

import msgspec
import numpy as np
import torch

from nori_cluster.attention import ATTENTION
from nori_cluster.attention.base import AttentionBackend
from nori_cluster.checkpoint.hf_config import CheckpointConfig, read_config
from nori_cluster.checkpoint.parallel import validate_parallel
from nori_cluster.checkpoint.progress import Progress
from nori_cluster.config import GroupConfig, ModelConfig, SchedulerConfig, existing_folder
from nori_cluster.device.forward import ForwardBatch
from nori_cluster.device.kv_cache import KVCache
from nori_cluster.device.parallel import TPGroup
from nori_cluster.errors import ConfigError
from nori_cluster.layers.shard import LayerContext
from nori_cluster.models import MODELS
from nori_cluster.models.base import ModelFamily, ModelSpec
from nori_cluster.models.decoder import Decoder
from nori_cluster.models.invariance import keeps_bits
from nori_cluster.quant import QUANT
from nori_cluster.types import GroupSpec, StepLogprobs, StepPlan, StepResult, pack, unpack
from nori_cluster.worker.batch import build_batch, row_lengths
from nori_cluster.worker.chooser import Chooser
from nori_cluster.worker.loader import fingerprint, load_model
from nori_cluster.worker.memory import count_blocks
from nori_cluster.worker.numerics import attention_name, numerics_id, require_batch_invariant, require_proof
from nori_cluster.worker.placement import resolve_device, resolve_dtype
from nori_cluster.worker.proposer import NgramProposer, Proposer
from nori_cluster.worker.reload import CheckpointFacts, read_facts, require_same
from nori_cluster.worker.sampler import concatenated
from nori_cluster.worker.slots import Int32Array, SlotTable, spread
from nori_cluster.worker.structured import Structured
from nori_cluster.worker.verify import Kept, verify
from nori_cluster.worker.vocabulary import allowed_ids

log = logging.getLogger(__name__)

PROMPT_ROWS = 64  # prompt positions whose logits are held at once
_NO_FAILURES: tuple[tuple[int, str], ...] = ()


class Worker:
    """Call load once, then execute for each plan, in plan order; from one thread.

    Raises ConfigError or CheckpointError from load; any exception out of execute means the group is lost.
    """

    def __init__(self, config: GroupConfig, group: TPGroup) -> None:
        self.group = group
        self.device = resolve_device(config.parallel.device, group.rank)
        self.config = msgspec.structs.replace(config, scheduler=config.resolved_scheduler(self.device.type))
        if self.device.type == "cpu":
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(config.parallel.threads or max(1, cores // group.size))
        self.model: Decoder
        self.cache: KVCache
        self.table: SlotTable
        self.backend: AttentionBackend
        self._family: type[ModelFamily]
        self._context: LayerContext
        self._facts: CheckpointFacts
        self._spec: GroupSpec
        self._proposer: Proposer | None = None
        self._chooser: Chooser | None = None  # on rank 0

    @torch.inference_mode()
    def load(self, progress: Progress | None = None) -> GroupSpec:
        """Read the weights, size the KV cache; the same GroupSpec on every rank."""
        folder = existing_folder(self.config.model.path)
        checkpoint = read_config(folder)
        self._family = MODELS[checkpoint.architecture]
        validate_parallel(checkpoint, self.group.size)
        quant = QUANT[(checkpoint.raw.get("quantization_config") or {}).get("quant_method", "none")]
        max_model_len = _max_model_len(self.config, checkpoint)
        dtype = resolve_dtype(self.config.model.dtype, checkpoint.torch_dtype, self.device)
        invariant = self.config.numerics.batch_invariant
        if invariant:
            require_batch_invariant(quant, dtype, self.device, self.group)
        self._context = LayerContext(self.group, dtype, self.device, quant, invariant)
        spec = self._family.spec_from_hf(checkpoint)
        self._read_weights(folder, spec, progress if self.group.rank == 0 else None)
        self._facts = read_facts(folder, [source.checkpoint for source in self._family.weights(spec)])
        self._make_cache(spec, dtype, max_model_len)
        if invariant:
            require_proof(keeps_bits(self.model, self.backend, self.cache))
        if self.group.rank == 0:
            mode = self.config.numerics.logprobs_mode
            allowed = self._allowed(folder, spec.vocab_size)
            structured = Structured(folder, spec.vocab_size, checkpoint.eos_token_ids)
            structured.preload()
            self._chooser = Chooser(self.table, structured, spec.vocab_size, self.device, allowed, mode)
        self._spec = GroupSpec(
            model=self.config.model.name,
            vocab_size=spec.vocab_size,
            max_model_len=max_model_len,
            num_blocks=self.cache.num_blocks,
            block_size=self.cache.block_size,
            eos_token_ids=checkpoint.eos_token_ids,
            dtype=str(dtype).removeprefix("torch."),
            numerics_id="",
        )
        return self._identified(folder)

    def check_reload(self, model: ModelConfig) -> None:
        """CheckpointError or ConfigError unless model.path differs from the loaded folder in its weights only."""
        require_same(self._facts, existing_folder(model.path))

    @torch.inference_mode()
    def reload(self, model: ModelConfig) -> GroupSpec:
        """Other weights in the place of these, after check_reload and while no sequence is alive; the same GroupSpec on
        every rank. What the KV cache held is gone."""
        folder = existing_folder(model.path)
        spec = self.model.spec
        del self.model  # there is no room for both
        self._read_weights(folder, spec, None)
        self.cache.tensor.zero_()
        if self.config.numerics.batch_invariant:
            require_proof(keeps_bits(self.model, self.backend, self.cache))
        self.config = msgspec.structs.replace(self.config, model=model)
        return self._identified(folder)

    def _read_weights(self, folder: Path, spec: ModelSpec, progress: Progress | None) -> None:
        self.model = load_model(folder, self._family, spec, self._context, progress)

    def _identified(self, folder: Path) -> GroupSpec:
        """The spec, with the ids of the weights that are loaded now."""
        weights, version = fingerprint(folder), self.config.model.weight_version
        self._spec = msgspec.structs.replace(
            self._spec,
            numerics_id=numerics_id(weights, self._context.dtype, self.group, self.backend, self.device),
            weights_id=f"{weights}@{version}",
            weight_version=version,
        )
        return self._spec

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | None:
        """Apply one plan. The result on rank 0, None on the others."""
        self.table.drop(unpack(plan.drops))
        for start in plan.starts:
            self.table.start(start)
        if self._chooser is not None:
            self._chooser.enter(unpack(plan.drops), plan.starts)
        slots, bounds = unpack(plan.slots), unpack(plan.counts)
        (blocks,) = plan.blocks
        fresh = self.table.append_blocks(slots, blocks)
        if len(fresh):
            self.cache.clear(fresh)
        lengths = row_lengths(self.table, slots, bounds)
        batch = build_batch(self.table, slots, lengths, self.device)
        if self._chooser is not None:
            self._chooser.begin(slots[batch.sample_rows], batch.sample_places.astype(np.int32))
        hidden = self.model(batch, self.backend)
        return self._finish(plan.step, slots, lengths, batch, hidden)

    def _finish(
        self, step: int, slots: Int32Array, lengths: Int32Array, batch: ForwardBatch, hidden: torch.Tensor
    ) -> StepResult | None:
        """Sample where rows reached their true length, tell all ranks, advance the table."""
        prompt_logprobs = self._prompt_logprobs(slots, lengths, batch, hidden)
        counts, proposed = np.zeros(len(slots), np.int32), np.zeros(len(slots), np.int32)
        ids, logprobs, failures = np.zeros(0, np.int32), None, _NO_FAILURES
        if len(batch.sample_rows):
            kept, ids = self._settle(slots, batch, hidden, self._choose(slots, batch, hidden))
            counts[kept.rows], proposed[kept.rows] = kept.counts, kept.drafts
            lengths = lengths.copy()
            lengths[kept.rows] -= kept.drafts + 1 - kept.counts  # drafts that were not kept were computed in vain
            if self._chooser is not None:
                logprobs, failures = self._chooser.report(kept.positions, batch.sample_rows)
        self.table.advance(slots, lengths)
        if self.group.rank:
            return None
        return StepResult(
            step,
            pack(counts),
            pack(ids),
            logprobs,
            prompt_logprobs=prompt_logprobs,
            proposed=pack(proposed) if proposed.any() else b"",
            failures=failures,
        )

    def _choose(self, slots: Int32Array, batch: ForwardBatch, hidden: torch.Tensor) -> Int32Array | None:
        """An id for each position; None on other ranks than 0."""
        logits = self.model.logits(hidden[batch.sample_tokens])
        if logits is None or self._chooser is None:
            return None
        return self._chooser.choose(logits, slots[batch.sample_rows], batch.sample_places.astype(np.int32))

    def _settle(
        self, slots: Int32Array, batch: ForwardBatch, hidden: torch.Tensor, chosen: Int32Array | None
    ) -> tuple[Kept, Int32Array]:
        """Rank 0's ids become every rank's: which of them count enters the table, with the drafts of the next step."""
        positions = len(batch.sample_rows)
        ids = np.zeros(positions, np.int32) if chosen is None else chosen
        if self._proposer is None:
            ids = self._broadcast(ids)
            return self._append(slots, batch, ids)
        drafting = slots[batch.sample_rows[batch.sample_places == 0]]
        message = np.zeros(positions + len(drafting) * (1 + self._proposer.max_drafts), np.int32)
        message[:positions] = ids
        if chosen is not None:
            kept, new = self._append(slots, batch, ids)
            newest = kept.positions[np.cumsum(kept.counts) - 1]
            drafts, counts = self._proposer.propose(self.table, drafting, hidden[batch.sample_tokens[newest]])
            message[positions:] = np.concatenate([counts, drafts.ravel()])
        message = self._broadcast(message)
        if chosen is None:
            kept, new = self._append(slots, batch, message[:positions])
        self.table.num_drafts[drafting] = message[positions : positions + len(drafting)]
        self.table.drafts[drafting] = message[positions + len(drafting) :].reshape(len(drafting), -1)
        return kept, new

    def _append(self, slots: Int32Array, batch: ForwardBatch, ids: Int32Array) -> tuple[Kept, Int32Array]:
        kept = verify(self.table, slots, batch, ids)
        new = ids[kept.positions]
        self.table.append_tokens(slots[kept.rows], new, kept.counts if len(new) > len(kept.rows) else None)
        if self._chooser is not None:
            self._chooser.keep(slots[batch.sample_rows[kept.positions]], new)
        return kept, new

    def _prompt_logprobs(
        self, slots: Int32Array, lengths: Int32Array, batch: ForwardBatch, hidden: torch.Tensor
    ) -> StepLogprobs | None:
        """Logprobs of the prompt tokens that follow those computed in this step, of the rows that ask for them."""
        table = self.table
        asking = np.flatnonzero(table.sampling.prompt_logprobs[slots] >= 0)
        ends = np.minimum(lengths[asking], table.prompt_len[slots[asking]] - 1 - table.computed[slots[asking]])
        owners, places = spread(np.maximum(ends, 0))
        if not len(owners):
            return None
        rows = asking[owners]
        owner_slots = slots[rows]
        targets = table.tokens[owner_slots, table.computed[owner_slots] + places + 1]
        wanted = table.sampling.prompt_logprobs[owner_slots]
        where = torch.from_numpy(batch.query_starts[rows].astype(np.int64) + places).to(self.device)
        parts = []
        for first in range(0, len(rows), PROMPT_ROWS):
            part = slice(first, first + PROMPT_ROWS)
            logits = self.model.logits(hidden[where[part]])
            if logits is not None and self._chooser is not None:
                parts.append(self._chooser.score(logits, targets[part], wanted[part], rows[part]))
        return concatenated(parts) if parts else None

    def _broadcast(self, ids: Int32Array) -> Int32Array:
        if self.group.size == 1:
            return ids
        shared = torch.from_numpy(ids).to(self.device)
        self.group.broadcast(shared)
        received: Int32Array = shared.cpu().numpy()
        return received

    def _allowed(self, folder: Path, vocab_size: int) -> torch.Tensor | None:
        """bool [vocab], or None when every id stands for a token."""
        allowed = allowed_ids(folder, vocab_size)
        if allowed is None:
            return None
        log.info("%d ids of the vocabulary stand for no token and are never sampled", int((~allowed).sum()))
        return torch.from_numpy(allowed).to(self.device)

    def _make_cache(self, spec: ModelSpec, dtype: torch.dtype, max_model_len: int) -> None:
        size = self.config.cache.block_size
        kv_heads = spec.num_kv_heads // self.group.size
        block_bytes = KVCache.block_bytes(spec.num_layers, kv_heads, size, spec.head_dim, dtype)
        limits = self.config.scheduler
        blocks = self.group.minimum(
            count_blocks(
                self.config.cache,
                limits,
                max_model_len,
                block_bytes,
                self.device,
                self.group.size,
                _step_bytes(spec, limits, dtype, max_model_len),
            )
        )
        self.cache = KVCache(blocks, spec.num_layers, kv_heads, size, spec.head_dim, dtype, self.device)
        speculative = self.config.speculative
        self._proposer = None if speculative is None else NgramProposer(speculative)
        drafts = self._proposer.max_drafts if self._proposer else 0
        self.table = SlotTable(self.config.scheduler.max_num_seqs, max_model_len + 1, size, drafts)
        name = attention_name(self.device, self.config.numerics.batch_invariant, self.config.numerics.attention_backend)
        log.info("attention %s on %s (asked: %s)", name, self.device, self.config.numerics.attention_backend)
        backend = ATTENTION[name]
        if not backend.supports(self.device, dtype, spec.head_dim):
            raise ConfigError(f"attention {name} does not run {dtype} with head_dim {spec.head_dim} on {self.device}")
        self.backend = backend(self.cache, spec.num_heads // self.group.size, spec.score_scale, spec.patterns)


def _step_bytes(spec: ModelSpec, limits: SchedulerConfig, dtype: torch.dtype, max_model_len: int) -> int:
    """Generous estimate of a step's activations, attention scores and logits."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    per_token = (6 * spec.hidden_size + spec.feed_forward_numbers + 3 * heads) * dtype.itemsize
    per_token += 3 * max_model_len * 4
    rows = max(limits.max_num_seqs * (1 + limits.draft_tokens), PROMPT_ROWS)
    return limits.step_tokens * per_token + rows * spec.vocab_size * 4 * 6


def _max_model_len(config: GroupConfig, checkpoint: CheckpointConfig) -> int:
    asked, own = config.model.max_model_len, checkpoint.max_position_embeddings
    if asked is None:
        return own
    if not 1 <= asked <= own:
        raise ConfigError(f"max_model_len {asked} must lie between 1 and the model's {own}", param="max_model_len")
    return asked
