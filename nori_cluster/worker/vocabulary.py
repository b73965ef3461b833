"""Which ids of a model's vocabulary stand for a token: checkpoints often pad the vocabulary beyond the tokenizer."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nori_cluster.checkpoint.folder import read_json_object


def allowed_ids(folder: Path, vocab_size: int) -> NDArray[np.bool_] | None:
    """bool [vocab_size], False where tokenizer.json has no token; None when all have one or there is no such file."""
    tokenizer = read_json_object(folder, "tokenizer.json")
    if tokenizer is None:
        return None
    vocab = tokenizer.get("model", {}).get("vocab")
    if not isinstance(vocab, dict):  # a unigram model's list of [token, score]
        ids = list(range(len(vocab or [])))
    else:
        ids = [value for value in vocab.values() if isinstance(value, int)]
    ids += [token["id"] for token in tokenizer.get("added_tokens", []) if isinstance(token.get("id"), int)]
    allowed = np.zeros(vocab_size, np.bool_)
    known = np.array(ids, np.int64)
    allowed[known[(known >= 0) & (known < vocab_size)]] = True
    return None if allowed.all() or not allowed.any() else allowed
