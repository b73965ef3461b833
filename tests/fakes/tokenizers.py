"""tokenizer.json texts of several families, made in memory: byte-level with merges, Llama 2 style, a vocabulary whose
merges spell a control token; and the converted demo model, where there is one."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nori_cluster import env
from nori_cluster.frontend.token_table import byte_alphabet

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "def main(x): return x + 1",
    "Überraschung, 世界! 😀 im_end start",
]


def byte_level(special: Sequence[str] = ("<|im_start|>", "<|im_end|>"), corpus: Sequence[str] = CORPUS) -> str:
    """All 256 bytes, some merges, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in special],
        initial_alphabet=sorted(byte_alphabet()),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return str(tokenizer.to_str())


def forging(bos: bool = False) -> str:
    """Merges that build "<s>" out of its characters; with bos, that token is also put in front."""
    chars = "<s>ab"
    vocab = {text: i for i, text in enumerate(["<s>", *chars, "<s"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("<", "s"), ("<s", ">")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    return str(tokenizer.to_str())


def llama2() -> str:
    """SentencePiece style: ▁ for space, byte fallback, BOS in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrd", "he", "▁w"]
    vocab = {text: i for i, text in enumerate(pieces)}
    merges = [("h", "e"), ("▁", "w")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in pieces[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return str(tokenizer.to_str())


def word_piece() -> str:
    """A decoder that is no concatenation of token bytes: ## joins, words are spaced."""
    vocab = {text: i for i, text in enumerate(["[UNK]", "play", "##ing", "##ed", "the", "game", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return str(tokenizer.to_str())


def write_folder(folder: Path, definition: str, config: dict[str, object] | None = None) -> Path:
    """tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(definition, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}), encoding="utf-8")
    return folder


def demo_folder() -> Path:
    """The converted demo model; the calling test is skipped when this machine has none."""
    folder = env.home() / "models" / "smollm2-135m"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("the demo model is not converted here: nori models pull smollm2-135m")
    return folder
