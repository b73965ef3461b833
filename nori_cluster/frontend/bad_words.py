"""bad_words: texts that must not be generated → the token sequences that spell them."""

from collections.abc import Sequence

from nori_cluster.errors import ClientError
from nori_cluster.frontend.tokenizer import Tokenizer

MAX_WORDS = 256
MAX_WORD_CHARS = 256
PARAM = "bad_words"


def check_bad_words(words: Sequence[str]) -> None:
    """Raises ClientError for too many, an empty or a long one."""
    if len(words) > MAX_WORDS:
        raise ClientError(f"bad_words may hold at most {MAX_WORDS} strings", param=PARAM)
    for word in words:
        if not word:
            raise ClientError("bad_words must not hold an empty string", param=PARAM)
        if len(word) > MAX_WORD_CHARS:
            raise ClientError(f"a bad word may have at most {MAX_WORD_CHARS} characters", param=PARAM)


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens as at the beginning of a text and after a space, without repeats.

    Other spellings of the same text by other tokens are not found, as in vLLM. Raises ClientError for a word without
    tokens, or one that no tokenizer can represent.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            try:
                ids = tuple(tokenizer.encode(text, add_special=False))
            except ClientError as error:
                raise ClientError(error.message, param=PARAM) from error
            if not ids:
                raise ClientError(f"the tokenizer has no tokens for the bad word {word[:40]!r}", param=PARAM)
            found[ids] = None
    return tuple(found)
