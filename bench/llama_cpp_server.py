"""llama.cpp's own HTTP server out of the prebuilt wheel `xllamacpp`, for bench/peers.yaml. Run by that python."""

import argparse
import os
import signal
import sys

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--port", type=int, default=8200)
    parser.add_argument("--slots", type=int, default=32, help="sequences at a time")
    parser.add_argument("--context", type=int, default=16384, help="tokens of all slots together")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.hostnames = ["127.0.0.1"]
    params.port, params.n_parallel, params.n_ctx = options.port, options.slots, options.context
    params.cont_batching, params.cache_prompt, params.ui, params.n_gpu_layers = True, False, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before its threads start: they inherit it
    sys.stdout.write(f"{xllamacpp.get_system_info()}\n")
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    signal.sigwait(ends)
    os._exit(0)  # its destructor joins threads that wait for requests


if __name__ == "__main__":
    main()
