"""Trace files: three formats by hand, the real ones where they are at hand, and what is said about broken ones."""

from pathlib import Path

import pytest

from nori_cluster.bench.traces import TraceError, TraceRow, detect, read_trace

pytestmark = pytest.mark.unit
REAL = Path(__file__).parents[3] / "shared" / "data" / "traces"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0000000,110,27"
)
MOONCAKE = (
    '{"timestamp": 100, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]}\n\n'
    '{"timestamp": 1350, "input_length": 512, "output_length": 2, "hash_ids": [0], "more": 1}\n'
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "7.5,GPT-4,1087,0,1087,Conversation log\n"
    "45,ChatGPT,417,276,693,API log\n"
)


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, AZURE), None)
    assert rows[0] == TraceRow(0.0, 4808, 10)
    assert rows[1].at == pytest.approx(1.02004)
    assert (rows[1].input, rows[1].output) == (110, 27)


def test_mooncake(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, MOONCAKE), "mooncake") == [
        TraceRow(0.0, 1000, 5, (0, 7)),
        TraceRow(1.25, 512, 2, (0,)),
    ]


def test_burstgpt_leaves_out_what_failed_when_it_was_recorded(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, BURST), None) == [TraceRow(0.0, 472, 18), TraceRow(40.0, 417, 276)]


def test_rows_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, AZURE.replace("18:17:05", "18:17:01")), "azure")
    assert [row.input for row in rows] == [110, 4808]
    assert rows[0].at == 0


def test_carriage_returns_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbf" + AZURE.replace("\n", "\r\n").encode())
    assert len(read_trace(path, None)) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", (":1:", "mooncake", "azure")),
        ("a,b\n1,2\n", (":1:", "ContextTokens")),
        (AZURE.replace("110", "many"), (":3:", "ContextTokens", "'many'")),
        (AZURE.replace("110", "-4"), (":3:", "ContextTokens", "'-4'")),
        (AZURE.replace("110", "1.5"), (":3:", "ContextTokens")),
        (AZURE.replace(",27", ""), (":3:", "GeneratedTokens", "nothing")),
        (AZURE.replace("2023-11-16 18:17:05", "yesterday"), (":3:", "TIMESTAMP", "yesterday")),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", ("no requests",)),
        (MOONCAKE.replace('"input_length": 512', '"input_length": "512"'), (":3:", "input_length", "str")),
        (MOONCAKE.replace('"output_length": 2', '"output_length": 0'), (":3:", "output_length", "0")),
        (MOONCAKE.replace("[0, 7]", "[0]"), (":1:", "hash_ids", "2 blocks")),
        (MOONCAKE.replace("[0, 7]", "[0, -7]"), (":1:", "hash_ids", "negative")),
        (MOONCAKE.replace('"timestamp": 1350, ', ""), (":3:", "timestamp")),
        (MOONCAKE + "{broken\n", (":4:", "not a JSON object")),
        (BURST.replace("45,", "soon,"), (":4:", "Timestamp", "soon")),
        (BURST.replace("276", "nan"), (":4:", "Response tokens", "nan")),
    ],
)
def test_a_broken_trace_is_named_by_file_line_and_field(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_trace(path, None)
    assert str(path) in caught.value.message
    for word in words:
        assert word in caught.value.message


def test_a_missing_file_a_binary_one_and_the_wrong_format(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none", None)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "binary", None)
    with pytest.raises(TraceError, match="no column Timestamp"):
        read_trace(write(tmp_path, AZURE), "burstgpt")


@pytest.mark.skipif(not REAL.is_dir(), reason="the recorded traces are not at hand")
@pytest.mark.parametrize(
    ("name", "count", "median_input"),
    [
        ("azure_llm_2023_code.csv", 8819, 1469),
        ("azure_llm_2023_conv.csv", 19366, 1020),
        ("mooncake_conversation.jsonl", 12031, None),
        ("mooncake_synthetic.jsonl", 3993, None),
    ],
)
def test_recorded_traces(name: str, count: int, median_input: int | None) -> None:
    rows = read_trace(REAL / name, None)
    assert len(rows) == count
    assert rows[0].at == 0
    assert 3000 < rows[-1].at < 4000 or name == "mooncake_synthetic.jsonl"
    assert median_input is None or sorted(row.input for row in rows)[count // 2] == median_input
    assert bool(rows[0].blocks) == name.startswith("mooncake")


def test_detect_reads_the_first_line_only() -> None:
    assert detect(Path("x"), ['{"timestamp": 0}']) == "mooncake"
    assert detect(Path("x"), AZURE.splitlines()) == "azure"
    assert detect(Path("x"), BURST.splitlines()) == "burstgpt"
