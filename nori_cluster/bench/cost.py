"""A price file → what a million tokens cost on these devices. Nothing is known about prices here: the user states them.

File (YAML or JSON): {currency: USD, source: "list price, 2026-12", prices: {"H200": {per_hour: 3.5, unit: device},
"EPYC": {per_hour: 0.2, unit: machine}}}. A price is for the device whose name contains its key; the longest key wins.
"""

from pathlib import Path
from typing import Literal

import msgspec
import yaml

from nori_cluster.bench.environment import Device
from nori_cluster.errors import ConfigError


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """per_hour: of one device, or of the whole machine whatever it holds."""

    per_hour: float
    unit: Literal["device", "machine"] = "device"


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """source: where the prices come from, shown with every cost."""

    prices: dict[str, Price]
    currency: str = "USD"
    source: str = ""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """per_hour: of all devices of the run. per_million_*: the same hour over the tokens of that kind it made."""

    currency: str
    per_hour: float
    priced: str
    source: str
    per_million_output: float
    per_million_total: float | None = None
    per_million_uncached: float | None = None


def read_prices(path: Path) -> Prices:
    """Raises ConfigError for a file that is not one."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        prices = msgspec.convert(values, Prices)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: no price file: {error}") from error
    for name, price in prices.prices.items():
        if not 0 < price.per_hour < float("inf"):
            raise ConfigError(f"{path}: the price of {name!r} must be above 0")
    return prices


def per_hour(prices: Prices, devices: tuple[Device, ...]) -> tuple[float, str]:
    """What the devices cost in an hour, and how that was counted. Raises ConfigError for a device without a price."""
    if not devices:
        raise ConfigError("no cost: the devices are unknown (state them: --server-info devices='8x NVIDIA H200')")
    total, parts = 0.0, []
    for device in devices:
        keys = [key for key in prices.prices if key.lower() in device.name.lower()]
        if not keys:
            known = ", ".join(prices.prices) or "none"
            raise ConfigError(f"no price for {device.name!r}; the price file has: {known}")
        price = prices.prices[max(keys, key=len)]
        count = 1 if price.unit == "machine" else device.count
        total += price.per_hour * count
        parts.append(f"{count} × {device.name if price.unit == 'device' else 'machine'} at {price.per_hour:g}/h")
    return total, " + ".join(parts)


def cost(
    prices: Prices,
    devices: tuple[Device, ...],
    output_tok_s: float,
    total_tok_s: float | None = None,
    uncached_tok_s: float | None = None,
) -> Cost | None:
    """None when nothing was put out: there is no price for no tokens."""
    hour, priced = per_hour(prices, devices)
    if output_tok_s <= 0:
        return None

    def million(rate: float | None) -> float | None:
        return hour / (rate * 3600) * 1e6 if rate else None

    return Cost(
        currency=prices.currency,
        per_hour=hour,
        priced=priced,
        source=prices.source,
        per_million_output=hour / (output_tok_s * 3600) * 1e6,
        per_million_total=million(total_tok_s),
        per_million_uncached=million(uncached_tok_s),
    )
