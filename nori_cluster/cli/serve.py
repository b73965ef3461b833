"""`nori serve MODEL`: flags and file → ServeOptions → a cluster on this machine until Ctrl-C."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from nori_cluster.cli import flags
from nori_cluster.cli.options import ServeOptions, human_int, resolve_options
from nori_cluster.cli.running import launch

app = typer.Typer(add_completion=False)


def option(flag: str, text: str, default: str, *more: str) -> Any:
    return typer.Option(flag, *more, help=text, show_default=default)


def size(flag: str, text: str, default: str) -> Any:
    return typer.Option(flag, help=text, show_default=default, parser=human_int, metavar="<size>")


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="smollm2-135m, a checkpoint folder, a .gguf file or a Hugging Face repo id."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file of flag names and values; flags on the line win.")
    ] = None,
    served_model_name: Annotated[str | None, option("--served-model-name", "Id that clients use.", "MODEL")] = None,
    tensor_parallel_size: Annotated[
        int | None, option("--tensor-parallel-size", "Workers per group.", "1", "-tp")
    ] = None,
    replicas: Annotated[int | None, option("--replicas", "Worker groups.", "1")] = None,
    dtype: Annotated[str | None, option("--dtype", "auto, float32, bfloat16 or float16.", "auto")] = None,
    device: Annotated[str | None, option("--device", "auto, cpu or cuda.", "auto")] = None,
    max_model_len: Annotated[int | None, size("--max-model-len", "Longest context, tokens.", "the model's")] = None,
    max_num_seqs: Annotated[int | None, option("--max-num-seqs", "Most sequences per step.", "64")] = None,
    max_num_batched_tokens: Annotated[
        int | None, size("--max-num-batched-tokens", "Token budget of a step.", "256 on CPU, 8192 on CUDA")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, option("--gpu-memory-utilization", "Share of GPU memory for weights and KV.", "0.9")
    ] = None,
    kv_cache_memory_bytes: Annotated[
        int | None, size("--kv-cache-memory-bytes", "KV memory per worker.", "from free memory")
    ] = None,
    block_size: Annotated[int | None, option("--block-size", "Tokens per KV block.", "16")] = None,
    num_gpu_blocks_override: Annotated[
        int | None, option("--num-gpu-blocks-override", "KV blocks, whatever the memory.", "from memory")
    ] = None,
    chat_template: flags.ChatTemplate = None,
    api_key: flags.ApiKey = None,
    drain_timeout: flags.DrainTimeout = None,
    heartbeat_timeout: flags.HeartbeatTimeout = None,
    collective_timeout: flags.CollectiveTimeout = None,
    enable_prefix_caching: flags.PrefixCaching = None,
    async_scheduling: flags.AsyncScheduling = None,
    max_num_queued_reqs: flags.QueuedRequests = None,
    max_num_queued_tokens: flags.QueuedTokens = None,
    priority_aging: flags.PriorityAging = None,
    max_logprobs: flags.MaxLogprobs = None,
    logprobs_mode: flags.LogprobsMode = None,
    batch_invariant: flags.BatchInvariant = None,
    attention_backend: flags.AttentionBackend = None,
    speculative_config: flags.Speculative = None,
    host: flags.Host = None,
    port: flags.Port = None,
    grpc_port: flags.GrpcPort = None,
    router_port: flags.RouterPort = None,
    data_plane_port: flags.DataPlanePort = None,
    admin_port: flags.AdminPort = None,
    metrics_port: flags.MetricsPort = None,
) -> None:
    """Serve a model on this machine: a local Ray, router, controller, worker groups and an OpenAI-compatible gateway.

    Example: nori serve smollm2-135m --port 8100 --max-num-seqs 32
    """
    given = {name: value for name, value in context.params.items() if name in ServeOptions.__struct_fields__}
    raise typer.Exit(launch(resolve_options(given, config), Console(stderr=True, highlight=False)))
