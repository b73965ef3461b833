"""One rank of a group: applies plans in order to its SlotTable, runs the model, and on rank 0 samples.

plan → drops, starts, blocks → ForwardBatch → model → logits at rank 0 → ids to all ranks → SlotTable → StepResult.
"""

import hashlib
import logging
import os

import msgspec
import numpy as np
import torch

from nori_cluster.attention import ATTENTION
from nori_cluster.attention.base import AttentionBackend
from nori_cluster.checkpoint.hf_config import CheckpointConfig, read_config
from nori_cluster.checkpoint.parallel import validate_parallel
from nori_cluster.checkpoint.progress import Progress
from nori_cluster.config import GroupConfig, SchedulerConfig, existing_folder
from nori_cluster.device.forward import ForwardBatch
from nori_cluster.device.kv_cache import KVCache
from nori_cluster.device.parallel import TPGroup
from nori_cluster.errors import ConfigError
from nori_cluster.layers.shard import LayerContext
from nori_cluster.models import MODELS
from nori_cluster.models.base import ModelSpec
from nori_cluster.models.decoder import Decoder
from nori_cluster.quant import QUANT
from nori_cluster.types import GroupSpec, StepPlan, StepResult, pack, unpack
from nori_cluster.worker.batch import build_batch, row_lengths
from nori_cluster.worker.loader import fingerprint, load_model
from nori_cluster.worker.memory import count_blocks
from nori_cluster.worker.placement import resolve_device, resolve_dtype
from nori_cluster.worker.sampler import SamplingRows, sample
from nori_cluster.worker.slots import Int32Array, SlotTable
from nori_cluster.worker.vocabulary import allowed_ids

log = logging.getLogger(__name__)


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
        self._allowed: torch.Tensor | None = None

    @torch.inference_mode()
    def load(self, progress: Progress | None = None) -> GroupSpec:
        """Read the weights, size the KV cache; the same GroupSpec on every rank."""
        folder = existing_folder(self.config.model.path)
        checkpoint = read_config(folder)
        family = MODELS[checkpoint.architecture]
        validate_parallel(checkpoint, self.group.size)
        quant = QUANT[(checkpoint.raw.get("quantization_config") or {}).get("quant_method", "none")]
        max_model_len = _max_model_len(self.config, checkpoint)
        dtype = resolve_dtype(self.config.model.dtype, checkpoint.torch_dtype, self.device)
        context = LayerContext(self.group, dtype, self.device, quant)
        spec = family.spec_from_hf(checkpoint)
        self.model = load_model(folder, family, spec, context, progress if self.group.rank == 0 else None)
        self._allow(allowed_ids(folder, spec.vocab_size))
        self._make_cache(spec, dtype, max_model_len)
        return GroupSpec(
            model=self.config.model.name,
            vocab_size=spec.vocab_size,
            max_model_len=max_model_len,
            num_blocks=self.cache.num_blocks,
            block_size=self.cache.block_size,
            eos_token_ids=checkpoint.eos_token_ids,
            dtype=str(dtype).removeprefix("torch."),
            numerics_id=self._numerics_id(fingerprint(folder), dtype),
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | None:
        """Apply one plan. The result on rank 0, None on the others."""
        self.table.drop(unpack(plan.drops))
        for start in plan.starts:
            self.table.start(start)
        slots, bounds = unpack(plan.slots), unpack(plan.counts)
        (blocks,) = plan.blocks
        fresh = self.table.append_blocks(slots, blocks)
        if len(fresh):
            self.cache.clear(fresh)
        lengths = row_lengths(self.table, slots, bounds)
        batch = build_batch(self.table, slots, lengths, self.device)
        hidden = self.model(batch, self.backend)
        return self._finish(plan.step, slots, lengths, batch, hidden)

    def _finish(
        self, step: int, slots: Int32Array, lengths: Int32Array, batch: ForwardBatch, hidden: torch.Tensor
    ) -> StepResult | None:
        """Sample where rows reached their true length, tell all ranks, advance the table."""
        self.table.advance(slots, lengths)
        rows = batch.sample_rows
        counts = np.zeros(len(slots), np.int32)
        counts[rows] = 1
        logprobs = None
        ids = np.zeros(len(rows), np.int32)
        if len(rows):
            logits = self.model.logits(hidden[batch.sample_tokens])
            if logits is not None:
                parameters = SamplingRows.gather(self.table.sampling, slots[rows], self.table.output_index(slots[rows]))
                ids, logprobs = sample(logits, parameters, rows, self._allowed)
            ids = self._broadcast(ids)
            self.table.append_tokens(slots[rows], ids)
        if self.group.rank:
            return None
        return StepResult(step, pack(counts), pack(ids), logprobs)

    def _broadcast(self, ids: Int32Array) -> Int32Array:
        if self.group.size == 1:
            return ids
        shared = torch.from_numpy(ids).to(self.device)
        self.group.broadcast(shared)
        received: Int32Array = shared.cpu().numpy()
        return received

    def _allow(self, allowed: "np.ndarray[tuple[int], np.dtype[np.bool_]] | None") -> None:
        if allowed is not None:
            log.info("%d ids of the vocabulary stand for no token and are never sampled", int((~allowed).sum()))
            self._allowed = torch.from_numpy(allowed).to(self.device)

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
        self.table = SlotTable(self.config.scheduler.max_num_seqs, max_model_len + 1, size)
        name = "cpu_paged" if self.device.type == "cpu" else "reference"
        backend = ATTENTION[name]
        if not backend.supports(self.device, dtype, spec.head_dim):
            raise ConfigError(f"attention {name} does not run {dtype} with head_dim {spec.head_dim} on {self.device}")
        self.backend = backend(self.cache, spec.num_heads // self.group.size, spec.head_dim**-0.5)

    def _numerics_id(self, weights: str, dtype: torch.dtype) -> str:
        """Short hash of everything that decides the bits of a logit, batch shape apart."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        backend = type(self.backend).__name__
        text = "|".join((weights, str(dtype), "none", str(dtype), str(self.group.size), backend, device))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _step_bytes(spec: ModelSpec, limits: SchedulerConfig, dtype: torch.dtype, max_model_len: int) -> int:
    """Generous estimate of a step's activations, attention scores and logits."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    per_token = (6 * spec.hidden_size + 3 * spec.intermediate_size + 3 * heads) * dtype.itemsize
    per_token += 3 * max_model_len * 4
    return limits.step_tokens * per_token + limits.max_num_seqs * spec.vocab_size * 4 * 6


def _max_model_len(config: GroupConfig, checkpoint: CheckpointConfig) -> int:
    asked, own = config.model.max_model_len, checkpoint.max_position_embeddings
    if asked is None:
        return own
    if not 1 <= asked <= own:
        raise ConfigError(f"max_model_len {asked} must lie between 1 and the model's {own}", param="max_model_len")
    return asked
