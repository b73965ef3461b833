"""The Python API: LLM(model).generate(prompts), one worker in this process, no Ray, no sockets.

prompts → token ids → EngineCore over an InlineExecutor → Candidates (text, stop strings) → RequestOutputs.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeGuard

import msgspec
import numpy as np
from rich.progress import Progress as Bars

from nori_cluster.checkpoint.progress import Advance, NoProgress, Progress
from nori_cluster.checkpoint.source import model_name, resolve
from nori_cluster.config import GroupConfig, SpeculativeConfig, numerics, speculative
from nori_cluster.engine.core import EngineCore
from nori_cluster.engine.plan import StepDeltas
from nori_cluster.engine.scheduler import Scheduler
from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.errors import ClientError, ConfigError, EngineFailure, NoriError
from nori_cluster.frontend.admission import (
    Limits,
    check_prompts,
    check_sampling,
    resolve_max_tokens,
    resolve_sampling,
    resolve_seed,
)
from nori_cluster.frontend.backend import Finish, Started
from nori_cluster.frontend.bad_words import bad_word_ids, check_bad_words
from nori_cluster.frontend.candidate import Candidate
from nori_cluster.frontend.constraints import ConstraintChecker
from nori_cluster.frontend.detokenizer import Detokenizer
from nori_cluster.frontend.stop import StopMatcher
from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.telemetry import Histogram
from nori_cluster.types import RowSampling, SamplingParams, StepLogprobs, TokenLogprob, unpack
from nori_cluster.worker.inline import load_inline

Prompt = str | Sequence[int]
LIMITS = Limits(max_prompts=1 << 20, max_candidates=1 << 20, max_n=1 << 10)


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate. logprobs: one entry per token when asked for. stop_reason: the stop string or id that matched.

    *_drafts: speculated tokens kept and tried (0 where a stop string cut the output).
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    accepted_drafts: int = 0
    proposed_drafts: int = 0


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its `n` candidates. prompt: None when token ids were given.

    prompt_logprobs: one entry per prompt token when asked for, None for the first.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finished: bool = True


class LLM:
    """A model loaded into this process. Not for use by two threads at once.

    model: what `nori serve` takes (a folder, .gguf file, demo name or repository id); the keywords are its flags.
    progress: True draws bars while loading. Raises ConfigError, CheckpointError or ModelUnavailable.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        device: str = "auto",
        tensor_parallel_size: int = 1,
        threads: int | None = None,
        max_logprobs: int = 20,
        logprobs_mode: str = "raw",
        batch_invariant: bool = False,
        attention_backend: str = "auto",
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        progress: bool | Progress = False,
    ) -> None:
        if not isinstance(model, str) or not model:
            raise ConfigError(f"model must be a folder, file, demo name or repository id, not {model!r}", param="model")
        bars = _bars(progress)
        settings: dict[str, Any] = {
            "model": {"name": model_name(model), "path": "", "dtype": dtype, "max_model_len": max_model_len},
            "cache": {
                "block_size": block_size,
                "num_blocks": num_blocks,
                "kv_cache_memory_bytes": kv_cache_memory_bytes,
                "gpu_memory_utilization": gpu_memory_utilization,
            },
            "scheduler": {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens},
            "parallel": {"tensor_parallel_size": tensor_parallel_size, "device": device, "threads": threads},
            "numerics": {"batch_invariant": batch_invariant, "attention_backend": attention_backend},
        }
        config = msgspec.structs.replace(
            _checked(settings),
            numerics=numerics(logprobs_mode, batch_invariant, attention_backend),
            speculative=speculative(speculative_config),
        )
        self._limits = msgspec.structs.replace(LIMITS, max_logprobs=max_logprobs)
        folder = resolve(model, progress=bars)
        self.config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(folder)))
        self.tokenizer = Tokenizer.from_folder(folder)
        executor, self.spec = load_inline(self.config, bars)
        self._core = EngineCore(Scheduler(executor.worker.config.scheduler, self.spec), executor)
        self._next_key = 0
        self._checker = ConstraintChecker(self.tokenizer)  # starts nothing before the first constraint

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids); results in the order of the prompts.

        sampling_params: one for all or one per prompt; default SamplingParams() (16 tokens at temperature 1).
        Raises ClientError naming the parameter at fault before anything runs.
        """
        texts, ids = self._tokenize(prompts)
        params = self._resolve(ids, sampling_params)
        run = _Run(self._core, self.tokenizer, self._next_key)
        for prompt, sampling in zip(ids, params, strict=True):
            run.add(prompt, sampling)
        self._next_key += len(run.candidates)
        run.finish()
        return [
            RequestOutput(prompt=text, prompt_token_ids=prompt, outputs=tuple(outputs), prompt_logprobs=logprobs)
            for text, prompt, outputs, logprobs in zip(texts, ids, run.outputs(), run.prompt_logprobs, strict=True)
        ]

    def _tokenize(self, prompts: Prompt | Sequence[Prompt]) -> tuple[list[str | None], list[tuple[int, ...]]]:
        several = isinstance(prompts, Sequence | np.ndarray) and not isinstance(prompts, str)
        single = not several or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
        texts: list[str | None] = []
        ids: list[tuple[int, ...]] = []
        for prompt in [prompts] if single else prompts:
            if isinstance(prompt, str):
                texts.append(prompt)
                ids.append(tuple(self.tokenizer.encode(prompt)))
            elif _are_ids(prompt):
                texts.append(None)
                ids.append(tuple(map(int, prompt)))
            else:
                raise ClientError(f"a prompt is a string or a list of token ids, not {prompt!r:.80}", param="prompts")
        return texts, ids

    def _resolve(
        self, prompts: list[tuple[int, ...]], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        """Checked parameters per prompt with max_tokens, seed and the tokens of bad_words filled in."""
        each = (
            [given or SamplingParams()] * len(prompts) if given is None or isinstance(given, SamplingParams) else given
        )
        if len(each) != len(prompts):
            raise ClientError(f"{len(each)} sampling_params for {len(prompts)} prompts", param="sampling_params")
        vocab = self.spec.vocab_size
        resolved = []
        spelled: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}
        for prompt, unchecked in zip(prompts, each, strict=True):
            sampling = _typed(unchecked)
            if (words := sampling.bad_words) and words not in spelled:
                check_bad_words(words)
                spelled[words] = bad_word_ids(words, self.tokenizer)
            ids = (*sampling.bad_word_ids, *spelled.get(words, ()))
            sampling = msgspec.structs.replace(sampling, bad_word_ids=ids)
            if sampling.constraint is not None:
                self._checker.check_now(sampling.constraint, "constraint")
            check_sampling(sampling, vocab, self._limits, self.spec.eos_token_ids)
            if sampling.max_tokens == 0 and sampling.prompt_logprobs is None:
                raise ClientError("max_tokens must be at least 1 (0 goes with prompt_logprobs)", param="max_tokens")
            room = self.spec.max_model_len
            tokens = resolve_max_tokens(len(prompt), sampling.max_tokens, None, room, "prompts", "max_tokens")
            seed = resolve_seed(sampling.seed)
            sampling = resolve_sampling(sampling, tokens, vocab)
            resolved.append(msgspec.structs.replace(sampling, seed=seed, max_tokens=tokens))
        check_prompts(prompts, max((s.n for s in resolved), default=1), vocab, self._limits, "prompts")
        return resolved


class _Run:
    """The candidates of one generate call, fed to the engine a few at a time until all have ended."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer, first_key: int) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self.candidates: list[Candidate] = []
        self._first_key = first_key
        self._params: list[SamplingParams] = []  # per candidate
        self.prompt_logprobs: list[tuple[TokenLogprob | None, ...] | None] = []  # per prompt
        self._sizes: list[int] = []  # candidates per prompt
        self._prompts: dict[int, int] = {}  # key of candidate 0 → prompt, where its logprobs were asked for
        self._pending: deque[SequenceRequest] = deque()
        self._running: dict[int, Candidate] = {}
        self._times = Histogram(())
        self._error: NoriError | None = None

    def add(self, prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        self._sizes.append(sampling.n)
        self.prompt_logprobs.append(None)
        if sampling.prompt_logprobs is not None:
            self._prompts[self._first_key + len(self.candidates)] = len(self.prompt_logprobs) - 1
        for index in range(sampling.n):
            include = sampling.include_stop_str_in_output
            matcher = StopMatcher(sampling.stop, include) if sampling.stop else None
            detokenizer = Detokenizer(self.tokenizer, sampling.skip_special_tokens)
            logprobs = sampling.logprobs is not None
            key, eos = self._first_key + len(self.candidates), self.core.scheduler.spec.eos_token_ids
            self._pending.append(_request(key, prompt, sampling, index, eos))
            early, only = sampling.min_tokens, sampling.max_tokens == 0
            candidate = Candidate(self, index, detokenizer, matcher, include, logprobs, self._times, early, only)
            self.candidates.append(candidate)
            self._params.append(sampling)

    def finish(self) -> None:
        """Run until every candidate has ended. Whatever stops it early, the engine is left empty."""
        most = 2 * self.core.scheduler.config.max_num_seqs
        try:
            while self._pending or self._running:
                while self._pending and len(self._running) < most:
                    request = self._pending.popleft()
                    self._running[request.key] = self.candidates[request.key - self._first_key]
                    self.core.submit(request, monotonic())
                deltas = self.core.step(monotonic())
                if deltas is not None:
                    self._take(deltas)
                if self._error is not None:
                    raise self._error
        finally:
            for key in self._running:
                self.core.abort(key)
            while self.core.has_work:
                self.core.step(monotonic())

    def outputs(self) -> Iterator[list[CompletionOutput]]:
        """Per prompt, its candidates in order."""
        candidates = iter(self.candidates)
        for size in self._sizes:
            yield [_output(next(candidates)) for _ in range(size)]

    def _take(self, deltas: StepDeltas) -> None:
        for start in deltas.starts:
            if (prompt := self._prompts.get(start.key)) is not None:
                told = [] if start.prompt_logprobs is None else _entries(start.prompt_logprobs)
                self.prompt_logprobs[prompt] = (None, *told)
        logprobs = {} if deltas.logprobs is None else _by_row(deltas.logprobs)
        ids, at = deltas.ids.tolist(), 0
        for key, row, count in zip(deltas.keys.tolist(), deltas.rows.tolist(), deltas.counts.tolist(), strict=True):
            if (candidate := self._running.get(key)) is not None:
                entries = logprobs.get(row)
                candidate.tokens(ids[at : at + count], None if entries is None else entries[:count])
            at += count
        for finish in deltas.finishes:
            if (candidate := self._running.pop(finish.key, None)) is not None:
                if finish.error:
                    candidate.failed(EngineFailure(finish.error))
                drafts = finish.accepted_drafts, finish.proposed_drafts
                candidate.finished(Finish(finish.reason, finish.matched_token_id, *drafts))
                candidate.decode()
        for key in deltas.keys.tolist():
            if key in self._running and self._params[key - self._first_key].stop:
                self._running[key].decode()
                if self._running[key].finish_reason is not None:
                    self.core.abort(key)
                    del self._running[key]

    # CandidateOwner

    def on_failed(self, error: NoriError) -> None:
        self._error = error

    def on_accepted(self) -> None: ...
    def on_started(self, candidate: Candidate, start: Started) -> None: ...
    def on_first_token(self, now: float) -> None: ...
    def on_news(self, candidate: Candidate) -> None: ...
    def on_stop_string(self, candidate: Candidate) -> None: ...
    def on_overrun(self, tokens: int) -> None: ...


class _Bars:
    """A checkpoint Progress drawn by rich."""

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Advance]:
        with Bars(transient=True) as bars:
            task = bars.add_task(label, total=total)
            yield lambda count: bars.update(task, advance=count)


def _bars(progress: bool | Progress) -> Progress:
    if isinstance(progress, bool):
        return _Bars() if progress else NoProgress()
    return progress


def _checked(settings: Mapping[str, Any]) -> GroupConfig:
    """The config of right types; ConfigError names the argument of a wrong one."""
    try:
        return msgspec.convert(settings, GroupConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def _typed(sampling: SamplingParams) -> SamplingParams:
    """The same parameters with their types checked; `stop` may be one string, sequences may be lists."""
    if not isinstance(sampling, SamplingParams):
        raise ClientError(f"sampling_params must be SamplingParams, not {sampling!r:.80}", param="sampling_params")
    fields = msgspec.structs.asdict(sampling)
    fields["stop"] = (sampling.stop,) if isinstance(sampling.stop, str) else sampling.stop or ()
    try:
        return msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        raise ClientError(f"sampling_params: {error}", param="sampling_params") from error


def _are_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """Whether this is a sequence of integers (a bool is none)."""
    if not isinstance(prompt, Sequence | np.ndarray):
        return False
    return all(isinstance(token, int | np.integer) and not isinstance(token, bool) for token in prompt)


def _request(
    key: int, prompt: tuple[int, ...], sampling: SamplingParams, candidate: int, eos: tuple[int, ...]
) -> SequenceRequest:
    assert sampling.max_tokens is not None
    return SequenceRequest(
        key=key,
        prompt_token_ids=prompt,
        sampling=RowSampling.of(sampling, candidate, eos),
        max_tokens=max(1, sampling.max_tokens),
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )


def _by_row(packed: StepLogprobs) -> dict[int, list[TokenLogprob]]:
    """Plan row → logprobs of its tokens."""
    found: dict[int, list[TokenLogprob]] = {}
    for row, entry in zip(unpack(packed.rows).tolist(), _entries(packed), strict=True):
        found.setdefault(row, []).append(entry)
    return found


def _entries(packed: StepLogprobs) -> list[TokenLogprob]:
    counts = unpack(packed.top_counts).tolist()
    chosen = np.frombuffer(packed.chosen, "<f4").tolist()
    ids, values = unpack(packed.top_ids).tolist(), np.frombuffer(packed.top_values, "<f4").tolist()
    found, at = [], 0
    for count, logprob in zip(counts, chosen, strict=True):
        top = slice(at, at + count)
        found.append(TokenLogprob(logprob, tuple(ids[top]), tuple(values[top])))
        at += count
    return found


def _output(candidate: Candidate) -> CompletionOutput:
    delta = candidate.take(every_token=True)
    assert delta is not None
    assert delta.finish_reason is not None
    return CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=tuple(delta.token_ids),
        finish_reason=delta.finish_reason.name.lower(),
        stop_reason=delta.stop_reason,
        logprobs=None if delta.logprobs is None else tuple(delta.logprobs),
        accepted_drafts=candidate.accepted_drafts,
        proposed_drafts=candidate.proposed_drafts,
    )
