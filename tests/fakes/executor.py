"""A FakeExecutor: a worker without a model. Its KV cache stores token ids, and what it samples is a hash of what it
finds there through the block tables, so a wrong table, a freed block or a lost token changes the output."""

import random
from collections import deque

import numpy as np

from nori_cluster.types import GroupSpec, StepLogprobs, StepPlan, StepResult, pack, unpack

POISON = -7
FAILING = 99  # the seed of sequences that fail at some step


def next_token(tokens: np.ndarray, seed: int, vocab: int) -> int:
    """What the fake model says after `tokens`: depends on every one of them, and on the seed."""
    mixed = np.int64(seed) + np.dot(tokens.astype(np.int64) + 1, np.arange(1, len(tokens) + 1) * 2654435761 % 1000003)
    return int(mixed % vocab)


def prompt_entries(scored: list[tuple[int, int]]) -> StepLogprobs:
    """(row, prompt token) each; the fake's logprob of a token is its id, and so is its one top entry."""
    tokens = [token for _, token in scored]
    floats = np.array(tokens, "<f4").tobytes()
    return StepLogprobs(pack([row for row, _ in scored]), floats, pack([1] * len(scored)), pack(tokens), floats)


class FakeExecutor:
    """Executes plans at submit, hands results out late (at collect). Room for drafts is used at random: a draft that
    was kept is what it would have said anyway, of one that was not the KV cache holds rubbish."""

    chains = True

    def __init__(self, spec: GroupSpec, num_slots: int, depth: int = 1) -> None:
        self.depth = depth
        self.spec = spec
        self.kv = np.full((spec.num_blocks, spec.block_size), POISON, dtype=np.int64)
        width = -(-spec.max_model_len // spec.block_size) + 1
        self.table = np.full((num_slots, width), -1, dtype=np.int64)
        self.blocks = np.zeros(num_slots, dtype=np.int64)
        self.tokens: list[list[int]] = [[] for _ in range(num_slots)]
        self.computed = [0] * num_slots
        self.seeds = [0] * num_slots
        self.prompts: dict[int, int] = {}  # slot → prompt_len, of those that ask for prompt logprobs
        self.results: deque[StepResult] = deque()
        self.random = random.Random(num_slots)
        self.computed_tokens = 0
        self.closed = False

    def submit(self, plan: StepPlan) -> None:
        for slot in unpack(plan.drops):
            self.tokens[slot] = []
        for start in plan.starts:
            self.tokens[start.slot] = unpack(start.tokens).tolist()
            self.computed[start.slot] = start.computed
            self.seeds[start.slot] = start.sampling.seed
            controls = start.sampling.controls
            self.prompts[start.slot] = start.prompt_len if controls and controls.prompt_logprobs >= 0 else 0
            self.blocks[start.slot] = 0
        slots, counts = unpack(plan.slots), unpack(plan.counts)
        assert len(set(slots.tolist())) == len(slots), "a slot stands twice in one plan"
        self._take_blocks(slots, plan)
        out_counts, ids, proposed, scored, failures = [], [], [], [], []
        for row, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            begin = self.computed[slot]
            end = min(begin + count, self.prompts[slot] - 1)
            scored += [(row, self.tokens[slot][position + 1]) for position in range(begin, end)]
            if self.seeds[slot] == FAILING and self.random.random() < 0.2:
                failures.append((row, "the fake cannot go on"))
            room = count - (len(self.tokens[slot]) - self.computed[slot])
            sampled = self._advance(slot, count)
            drafts = self.random.randint(0, max(room, 0))
            kept = self.random.randint(0, drafts)
            for _ in range(kept):
                sampled += self._advance(slot, 1)
            for place in range(drafts - kept):
                self._write(slot, self.computed[slot] + place, POISON)
            proposed.append(drafts)
            out_counts.append(len(sampled))
            ids.extend(sampled)
        result = StepResult(
            plan.step,
            pack(out_counts),
            pack(ids),
            prompt_logprobs=prompt_entries(scored) if scored else None,
            proposed=pack(proposed),
            failures=tuple(failures),
        )
        self.results.append(result)

    def _take_blocks(self, slots: np.ndarray, plan: StepPlan) -> None:
        (group,) = plan.blocks
        ids, at = unpack(group.ids), 0
        for slot, count in zip(slots.tolist(), unpack(group.counts).tolist(), strict=True):
            have = self.blocks[slot]
            self.table[slot, have : have + count] = ids[at : at + count]
            self.blocks[slot] += count
            at += count
        assert at == len(ids)

    def _advance(self, slot: int, count: int) -> list[int]:
        size, known = self.spec.block_size, self.tokens[slot]
        end = min(self.computed[slot] + count, len(known))
        for position in range(self.computed[slot], end):
            self._write(slot, position, known[position])
        self.computed_tokens += end - self.computed[slot]
        self.computed[slot] = end
        if end < len(known):
            return []
        positions = np.arange(end)
        seen = self.kv[self.table[slot, positions // size], positions % size]
        token = next_token(seen, self.seeds[slot], self.spec.vocab_size)
        known.append(token)
        return [token]

    def _write(self, slot: int, position: int, token: int) -> None:
        block, offset = divmod(position, self.spec.block_size)
        assert block < self.blocks[slot], "a token has no block"
        self.kv[self.table[slot, block], offset] = token

    def collect(self) -> StepResult:
        return self.results.popleft()

    def poison(self, blocks: np.ndarray) -> None:
        """What a freed block holds must never matter."""
        self.kv[blocks] = POISON

    def check(self) -> None: ...

    def close(self) -> None:
        self.closed = True
