"""What a kernel must at least move and compute, from shapes; a measured time prints as a fraction of that floor.

The floor is the longer of bytes / bandwidth and operations / peak rate of the part: no launch, no latency, overlapped.
`python kernels/bench/cost.py paged_decode --rows 32 --context 2048 --target sm_90 --measured-us 120`; every kernel of
the catalog has a model of its name, and `list` names them.
"""

import argparse
import inspect
import json
import sys
from collections.abc import Callable

import attention_costs as attention
import product_costs as products
import row_costs
from floor import SIZES, Cost

from nori_kernels.targets import TARGETS

MODELS: dict[str, Callable[..., Cost]] = {
    model.__name__: model
    for model in (
        attention.cache_write,
        attention.merge_splits,
        attention.paged_decode,
        attention.paged_prefill,
        row_costs.choose,
        row_costs.edit_scores,
        row_costs.embed,
        row_costs.gated,
        row_costs.gated_quantized,
        row_costs.logprobs,
        row_costs.philox,
        row_costs.quantize_rows,
        row_costs.quantize_static,
        row_costs.rms_norm,
        products.count_slots,
        products.grouped_gemm,
        products.place_slots,
        products.reduce_slots,
        products.route,
        products.scaled_gemm,
        products.weight_gemm,
    )
}
FLOATS = ("bf16", "fp16", "fp32")
DTYPES = {"dtype": FLOATS, "kv_dtype": (*FLOATS, "fp8e4nv"), "operands": ("fp8e4nv", "i8"), "out": tuple(SIZES)}
CHOICES = {**DTYPES, "kind": tuple(row_costs.GATED), "scales": ("tensor", "row", "block")}


def size(text: str) -> int:
    if (number := int(text)) < 0:
        raise ValueError(text)
    return number


def add_arguments(parser: argparse.ArgumentParser, model: Callable[..., Cost]) -> None:
    """An option for each argument of the model, with its default."""
    for name, parameter in inspect.signature(model).parameters.items():
        flag, default = f"--{name.replace('_', '-')}", parameter.default
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        elif isinstance(default, int):
            parser.add_argument(flag, type=size, default=default)
        else:
            parser.add_argument(flag, choices=CHOICES[name], default=default)
    parser.add_argument("--target", choices=TARGETS, default="sm_90")
    parser.add_argument("--measured-us", type=float)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kernels = parser.add_subparsers(dest="kernel", required=True)
    kernels.add_parser("list")
    for name, model in MODELS.items():
        add_arguments(kernels.add_parser(name, description=model.__doc__), model)
    asked = vars(parser.parse_args())
    kernel = asked.pop("kernel")
    if kernel == "list":
        sys.stdout.write("\n".join(sorted(MODELS)) + "\n")
        return 0
    target, measured_us = TARGETS[asked.pop("target")], asked.pop("measured_us")
    if (reason := target.refusal({asked[name] for name in DTYPES if name in asked})) is not None:
        parser.error(reason)
    cost = MODELS[kernel](**asked)
    shown = {"part": target.part, "bytes": cost.bytes, "operations": cost.operations}
    shown["floor_us"] = round(cost.floor_s(target) * 1e6, 2)
    if measured_us is not None:
        shown["fraction_of_floor"] = round(cost.fraction(target, measured_us * 1e-6), 3)
    sys.stdout.write(json.dumps(shown) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
