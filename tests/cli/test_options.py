"""Flags, config file and defaults of `nori serve`; ports that are taken."""

import socket
from pathlib import Path

import pytest

from nori_cluster.cli.options import ServeOptions, cluster_config, human_int, json_object, resolve_options
from nori_cluster.cli.ports import PortInUse, check_free, wanted
from nori_cluster.config import NumericsConfig, SpeculativeConfig
from nori_cluster.errors import ConfigError

pytestmark = pytest.mark.unit


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: a\nport: 9000\nmax-num-seqs: 8\nkv_cache_memory_bytes: 1G\n")
    options = resolve_options({"port": 9001, "model": None, "replicas": None}, file)
    assert (options.model, options.port, options.max_num_seqs, options.replicas) == ("a", 9001, 8, 1)
    assert options.kv_cache_memory_bytes == 1 << 30


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-seq: 8", "did you mean max-num-seqs"),
        ("colour: red", "unknown key 'colour'"),
        ("port: eight", r"Expected `int`.*port"),
        ("dtype: float8", "dtype.*choose one of auto, float32"),
        ("- a\n- b", "mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: a\n" * (not text.startswith("-")) + text)
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_options({}, file)
    assert str(file) in caught.value.message


def test_a_missing_file_and_a_missing_model() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        resolve_options({"model": "a"}, Path("/nonexistent.yaml"))
    with pytest.raises(ConfigError, match="name a model"):
        resolve_options({}, None)


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5G", 3 << 29), ("2m", 2_000_000)]
)
def test_sizes(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "-1", "4KB", "k", "0x10"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        human_int(text)


def test_options_become_the_config() -> None:
    options = ServeOptions(
        model="m",
        served_model_name="name",
        tensor_parallel_size=2,
        replicas=3,
        dtype="float32",
        num_gpu_blocks_override=7,
    )
    config = cluster_config(options, Path("/folder"))
    assert config.group.model.name == "name"
    assert config.group.model.path == "/folder"
    assert config.group.parallel.tensor_parallel_size == 2
    assert config.group.cache.num_blocks == 7
    assert config.replicas == 3
    assert sorted(port for _, port, _ in wanted(config)) == [8000, 8001, 9090, 50051, 50052, 50100, 50101, 50102]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size"),
        ({"replicas": 0}, "--replicas"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"device": "tpu"}, "--device"),
        ({"port": 70000}, "--port 70000"),
        ({"port": 8001}, "--port and --admin-port are both 8001"),
        ({"port": 50100, "router_port": 50100}, "50100"),
        ({"chat_template": "/nonexistent.jinja"}, "--chat-template"),
        ({"num_gpu_blocks_override": 0}, "--num-gpu-blocks-override"),
        ({"kv_cache_memory_bytes": -1}, "--kv-cache-memory-bytes"),
        ({"max_model_len": 0}, "--max-model-len"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
        ({"drain_timeout": -1.0}, "--drain-timeout"),
        ({"heartbeat_timeout": 0.5}, "--heartbeat-timeout"),
        ({"collective_timeout": float("nan")}, "--collective-timeout"),
        ({"drain_timeout": float("nan")}, "--drain-timeout"),
        ({"drain_timeout": float("inf")}, "--drain-timeout"),
        ({"data_plane_port": 65535, "replicas": 2}, "2 groups need ports to 65536"),
        ({"data_plane_port": 7999, "replicas": 3}, "--port 8000 is also the data plane's: 7999 to 8001"),
        ({"served_model_name": ""}, "--served-model-name"),
        ({"api_key": ""}, "--api-key"),
        ({"api_key": "two words"}, "--api-key"),
        ({"max_logprobs": -1}, "--max-logprobs"),
        ({"logprobs_mode": "raw_logits"}, "'raw_logits' is unknown; choose raw or processed"),
        ({"speculative_config": {}}, "method None is not served; choose 'ngram'"),
        ({"speculative_config": {"method": "eagle"}}, "method 'eagle' is not served"),
        ({"speculative_config": {"method": "ngram", "k": 4}}, "unknown key 'k'; known are method, num_spec"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "between 1 and 16"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": "4"}}, "Expected `int`"),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_min": 5}}, "1 ≤ min ≤ max"),
    ],
)
def test_impossible_options(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cluster_config(ServeOptions(model="m", **change), Path())  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_sampling_options_reach_group_and_gateway(tmp_path: Path, mode: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"model: a\nmax-logprobs: 5\nlogprobs-mode: {mode}\nbatch-invariant: true\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 3}\n"
    )
    config = cluster_config(resolve_options({}, file), tmp_path)
    assert config.max_logprobs == 5
    assert (config.group.numerics.batch_invariant, config.group.numerics.logprobs_mode) == (True, f"{mode}_logprobs")
    assert config.group.speculative == SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert cluster_config(ServeOptions(model="m", logprobs_mode=f"{mode}_logprobs"), tmp_path).group.numerics == (
        NumericsConfig(logprobs_mode=f"{mode}_logprobs")  # type: ignore[arg-type]
    )
    file.write_text('model: a\nspeculative-config: \'{"method": "ngram"}\'\n')
    assert resolve_options({}, file).speculative_config == {"method": "ngram"}


@pytest.mark.parametrize("text", ["", "[1]", "{", "ngram", '{"method": "ngram"', "[" * 5000])
def test_speculative_config_must_be_a_json_object(text: str) -> None:
    with pytest.raises(ConfigError, match="not a JSON object"):
        json_object(text)


def test_the_chat_template_may_be_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    for value in ("{{ messages }}", str(file)):
        assert cluster_config(ServeOptions(model="m", chat_template=value), Path()).chat_template == "{{ messages }}"


def test_a_port_in_use_names_the_port_and_the_flag() -> None:
    free = {f"{name}_port": 0 for name in ("grpc", "router", "data_plane", "admin", "metrics")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = cluster_config(ServeOptions(model="m", port=port, **free), Path())
        with pytest.raises(PortInUse, match=rf"port {port} is in use; choose another with --port"):
            check_free(config)
    check_free(config)


def test_a_host_of_another_machine() -> None:
    free = dict.fromkeys(("port", "grpc_port", "router_port", "data_plane_port", "admin_port", "metrics_port"), 0)
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.77"):
        check_free(cluster_config(ServeOptions(model="m", host="192.0.2.77", **free), Path()))  # type: ignore[arg-type]
