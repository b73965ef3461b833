"""GGUF conversion against numpy references, and headers that lie."""

import json
import resource
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from fakes import gguf_files as fake
from fakes.gguf_files import QUANT
from fakes.tokenizers import demo_folder
from numpy.typing import NDArray
from safetensors.numpy import load_file

from nori_cluster.checkpoint import gguf as conversion
from nori_cluster.checkpoint.gguf_header import open_gguf
from nori_cluster.checkpoint.hf_config import read_config
from nori_cluster.checkpoint.safetensors_index import weight_entries
from nori_cluster.checkpoint.source import checked_folder
from nori_cluster.errors import CheckpointError
from nori_cluster.frontend.tokenizer import Tokenizer

pytestmark = pytest.mark.unit


def converted(source: Path, **options: object) -> Path:
    folder = source.with_suffix("")
    folder.mkdir()
    conversion.convert(source, folder, **options)  # type: ignore[arg-type]
    return checked_folder(folder)


def read_values(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor as float32, whatever its dtype; bfloat16 words widened."""
    values = {}
    for name, entry in weight_entries(folder).items():
        data = entry.file.read_bytes()[entry.start : entry.end]
        if entry.dtype == "BF16":
            array = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[entry.dtype]).astype(np.float32)
        values[name] = array.reshape(entry.shape)
    return values


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The gguf package's rounding, as an independent reference."""
    return gguf.quants.dequantize(gguf.quants.quantize(values, QUANT.BF16), QUANT.BF16)


@pytest.mark.parametrize("kind", [QUANT.F32, QUANT.F16, QUANT.BF16, QUANT.Q8_0, QUANT.Q4_0, QUANT.Q4_1])
def test_f39_every_type_round_trips(tmp_path: Path, kind: QUANT) -> None:
    weights = fake.random_llama()
    folder = converted(fake.write_llama(tmp_path / "tiny.gguf", weights, kind))
    found = read_values(folder)
    assert found.keys() == weights.keys()
    dtype = {QUANT.F32: "float32", QUANT.F16: "float16"}.get(kind, "bfloat16")
    assert read_config(folder).torch_dtype == dtype
    for name, values in weights.items():
        expected = values
        if values.ndim == 2:
            expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind).astype(np.float32)
        if dtype == "bfloat16":
            expected = bfloat16(expected)
        elif dtype == "float16":
            expected = expected.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


def test_f39_query_and_key_rows_are_unpermuted() -> None:
    rows = np.arange(fake.HEADS * fake.HEAD_DIM, dtype=np.float32)[:, None].repeat(4, 1)
    for heads in (fake.HEADS, fake.KV_HEADS):
        stored = fake.permute(rows, heads)
        assert not np.array_equal(stored, rows)
        np.testing.assert_array_equal(stored[conversion.unpermute(len(rows), heads)], rows)
    wrong = fake.permute(rows, fake.HEADS)[conversion.unpermute(len(rows), fake.KV_HEADS)]
    assert not np.array_equal(wrong, rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_asked_dtype(tmp_path: Path, dtype: str) -> None:
    folder = converted(fake.write_llama(tmp_path / "tiny.gguf", fake.random_llama(), QUANT.Q8_0), dtype=dtype)
    assert {entry.dtype for entry in weight_entries(folder).values()} == {conversion.SAFETENSORS_DTYPES[dtype]}
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == dtype


def test_tied_biased_and_sharded(tmp_path: Path) -> None:
    weights = fake.random_llama(tied=True, biases=True)
    folder = converted(fake.write_llama(tmp_path / "tiny.gguf", weights), shard_bytes=100_000)
    assert read_config(folder).tie_word_embeddings
    assert json.loads((folder / "config.json").read_text())["attention_bias"] is True
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    merged = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    assert merged.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(merged[name], values, err_msg=name)


def test_config_and_tokenizer(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template("{{ messages[0].content }}")
        writer.add_eot_token_id(0)

    folder = converted(fake.write_llama(tmp_path / "tiny.gguf", fake.random_llama(), change=change))
    config = read_config(folder)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 2, 16)
    assert config.eos_token_ids == (1, 0)
    assert (config.raw["rms_norm_eps"], config.raw["rope_theta"]) == (1e-5, 10000.0)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_ids == {0, 1}
    digits = tokenizer.encode("the  12")
    assert [tokenizer.token_text(i) for i in digits] == ["t", "he", " ", " ", "1", "2"]
    assert tokenizer.encode("<tool>") == [2]
    assert "messages" in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]


def test_added_bos(tmp_path: Path) -> None:
    folder = converted(fake.write_llama(tmp_path / "tiny.gguf", fake.random_llama(), pre="llama-bpe"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("he")[0] == 0
    assert tokenizer.encode("he", add_special=False) == [tokenizer.token_id("he")]
    assert [tokenizer.token_text(i) for i in tokenizer.encode("'LL 1234", add_special=False)][:3] == ["'", "L", "L"]


def test_bfloat16_rounds_to_nearest_even() -> None:
    words = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800001], np.uint32)
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7F80, 0xFFC0]
    assert conversion.to_bfloat16(words.view(np.float32)).tolist() == expected
    random = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    random = random[np.isfinite(random)]
    np.testing.assert_array_equal(
        (conversion.to_bfloat16(random).astype(np.uint32) << 16).view(np.float32), bfloat16(random.reshape(1, -1))[0]
    )


def test_llama3_rope_is_recognised(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, **conversion.LLAMA3_ROPE}
    factors = conversion.llama3_factors(10000.0, fake.HEAD_DIM, scaling).astype(np.float32)
    path = fake.write_llama(tmp_path / "a.gguf", fake.random_llama(), extra={conversion.ROPE_FREQS: factors})
    assert read_config(converted(path)).raw["rope_scaling"] == {"rope_type": "llama3", **scaling}
    odd = fake.write_llama(tmp_path / "b.gguf", fake.random_llama(), extra={conversion.ROPE_FREQS: factors * 2})
    with pytest.raises(CheckpointError, match="rope_freqs"):
        converted(odd)


def test_f39_unknown_quant_type_is_refused_by_name(tmp_path: Path) -> None:
    weights = fake.random_llama()
    path = fake.write_llama(tmp_path / "tiny.gguf", weights, QUANT.Q5_0)
    with pytest.raises(CheckpointError, match=r"'token_embd\.weight' has type Q5_0; readable are BF16"):
        converted(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_string("llama.rope.scaling.type", "yarn"), "rope scaling 'yarn'"),
        (lambda w: w.add_uint32("llama.expert_count", 8), "mixture-of-experts"),
        (lambda w: w.add_uint32("llama.attention.key_length", 32), "shape|rotated"),
        (lambda w: w.add_uint32("tokenizer.ggml.padding_token_id", 9999), "9999 is not one of"),
        (lambda w: w.add_string("tokenizer.ggml.add_bos_token", "x"), "add_bos_token: expected bool"),
    ],
)
def test_what_is_not_converted_is_refused(tmp_path: Path, change: object, message: str) -> None:
    path = fake.write_llama(tmp_path / "tiny.gguf", fake.random_llama(), change=change)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=message) as error:
        converted(path)
    assert "tiny.gguf" in error.value.message


def test_architecture_pre_tokenizer_and_tensors(tmp_path: Path) -> None:
    weights = fake.random_llama()
    with pytest.raises(CheckpointError, match="architecture 'gpt2'"):
        converted(fake.write_llama(tmp_path / "a.gguf", weights, architecture="gpt2"))
    with pytest.raises(CheckpointError, match="pre-tokenizer 'grok-9' is not known"):
        converted(fake.write_llama(tmp_path / "b.gguf", weights, pre="grok-9"))
    with pytest.raises(CheckpointError, match=r"'blk\.0\.surprise\.weight' is not part"):
        extra = {"blk.0.surprise.weight": np.ones(4, np.float32)}
        converted(fake.write_llama(tmp_path / "c.gguf", weights, extra=extra))
    less = {name: value for name, value in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_up\.weight' is missing"):
        converted(fake.write_llama(tmp_path / "d.gguf", less))
    wrong = weights | {"model.layers.1.mlp.up_proj.weight": np.ones((8, 32), np.float32)}
    with pytest.raises(CheckpointError, match=r"shape \[8, 32\], expected \[64, 128\]"):
        converted(fake.write_llama(tmp_path / "e.gguf", wrong))
    loud = weights | {"model.norm.weight": np.full(fake.HIDDEN, 1e6, np.float32)}
    with pytest.raises(CheckpointError, match="does not fit float16"):
        converted(fake.write_llama(tmp_path / "f.gguf", loud), dtype="float16")


def lying_files() -> dict[str, bytes]:
    """F53's GGUF kinds; each is a small file."""
    pad = bytes(4096)
    u32, key = 4, fake.string("k")
    alignment = fake.string("general.alignment")
    array = struct.pack("<I", 9)
    return {
        "version 99": fake.header(version=99, body=pad),
        "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + pad,
        "kv count 2^60": fake.header(keys=1 << 60, body=pad),
        "tensor count 2^60": fake.header(tensors=1 << 60, body=pad),
        "key length 2^60": fake.header(keys=1, body=struct.pack("<Q", 1 << 60) + pad),
        "string length 2^60": fake.header(keys=1, body=key + struct.pack("<IQ", 8, 1 << 60) + pad),
        "value type 77": fake.header(keys=1, body=key + struct.pack("<I", 77) + pad),
        "array length 2^60": fake.header(keys=1, body=key + array + struct.pack("<IQ", u32, 1 << 60) + pad),
        "string array length 2^60": fake.header(keys=1, body=key + array + struct.pack("<IQ", 8, 1 << 60) + pad),
        "nested array": fake.header(keys=1, body=key + array + struct.pack("<IQ", 9, 1) + pad),
        "key twice": fake.header(keys=2, body=(key + struct.pack("<II", u32, 1)) * 2 + pad),
        "key not UTF-8": fake.header(keys=1, body=struct.pack("<Q", 2) + b"\xff\xfe" + pad),
        "n_dims 1000000": fake.header(tensors=1, body=fake.tensor_info("t", [1], n_dims=1_000_000) + pad),
        "n_dims 0": fake.header(tensors=1, body=fake.tensor_info("t", []) + pad),
        "dimension 0": fake.header(tensors=1, body=fake.tensor_info("t", [4, 0]) + pad),
        "product wraps 2^64": fake.header(tensors=1, body=fake.tensor_info("t", [1 << 32, 1 << 32]) + pad),
        "product wraps to a small size": fake.header(tensors=1, body=fake.tensor_info("t", [1 << 62, 4]) + pad),
        "offset outside": fake.header(tensors=1, body=fake.tensor_info("t", [4], offset=1 << 62) + pad),
        "offset unaligned": fake.header(tensors=1, body=fake.tensor_info("t", [4], offset=7) + pad),
        "overlap": fake.header(tensors=2, body=fake.tensor_info("a", [64]) + fake.tensor_info("b", [64]) + pad),
        "tensor twice": fake.header(tensors=2, body=fake.tensor_info("a", [8]) * 2 + pad),
        "tensor type 99": fake.header(tensors=1, body=fake.tensor_info("t", [32], type_=99) + pad),
        "row no multiple of a block": fake.header(tensors=1, body=fake.tensor_info("t", [33], type_=8) + pad),
        "alignment 0": fake.header(keys=1, body=alignment + struct.pack("<II", u32, 0) + pad),
        "alignment 2^31": fake.header(keys=1, body=alignment + struct.pack("<II", u32, 1 << 31) + pad),
        "alignment 3": fake.header(keys=1, body=alignment + struct.pack("<II", u32, 3) + pad),
        "alignment is a string": fake.header(keys=1, body=alignment + struct.pack("<I", 8) + key + pad),
        "cut in the header": fake.header(keys=1, body=key),
        "empty": b"",
        "not GGUF": b"PK\x03\x04" + pad,
    }


@pytest.mark.parametrize("kind", lying_files())
def test_f53_lying_headers(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lying.gguf"
    path.write_bytes(lying_files()[kind])
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(CheckpointError, match=r"lying\.gguf: ."):
        open_gguf(path)
    assert time.monotonic() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("key", ["tokens", "token_type", "merges"])
def test_f53_arrays_of_the_wrong_type(tmp_path: Path, key: str) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        values = writer.kv_data[0]
        values[f"tokenizer.ggml.{key}"] = gguf.gguf_writer.GGUFValue([1.5, 2.5], gguf.GGUFValueType.ARRAY)

    path = fake.write_llama(tmp_path / "tiny.gguf", fake.random_llama(), change=change)
    with pytest.raises(CheckpointError, match=f"tokenizer.ggml.{key}: an array of float"):
        converted(path)


def test_f53_cut_file(tmp_path: Path) -> None:
    path = fake.write_llama(tmp_path / "tiny.gguf", fake.random_llama())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="do not lie in the file"):
        open_gguf(path)


@pytest.mark.parametrize("seed", range(40))
def test_f53_random_damage_is_refused_or_harmless(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    data = bytearray(fake.write_llama(tmp_path / "tiny.gguf", fake.random_llama()).read_bytes())
    for _ in range(4):
        data[random.integers(0, 9000)] = random.integers(0, 256)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    problem, count = "", len(fake.random_llama())
    try:
        count = len(weight_entries(converted(path)))
    except CheckpointError as error:
        problem = error.message
    assert "damaged" in problem or count == len(fake.random_llama())


def test_f39_demo_conversion_is_bit_equal(tmp_path: Path) -> None:
    """Against the gguf package's own reader and dequantization; needs the GGUF beside the converted demo model."""
    source = demo_folder().parent / "smollm2-135m.gguf"
    if not source.is_file():
        pytest.skip("the demo's GGUF is not kept here")
    found = read_values(demo_folder())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    assert len(found) == len(tensors) == 272
    for name, values in found.items():
        tensor = tensors[fake.gguf_name(name)]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if heads := 9 if "q_proj" in name else 3 if "k_proj" in name else 0:
            rows = expected.shape[0]
            expected = expected.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(expected.shape)
        np.testing.assert_array_equal(values, bfloat16(expected.astype(np.float32)), err_msg=name)
