"""Philox4x32-10 against published and known vectors."""

import numpy as np
import pytest

from nori_cluster.worker.philox import gumbel, philox

pytestmark = pytest.mark.unit


def words(counter: tuple[int, int, int, int], key: int) -> list[int]:
    lanes = tuple(np.array([c], np.uint64) for c in counter)
    return philox(lanes, np.array([key], np.uint64))[0].tolist()  # type: ignore[arg-type]


def test_known_vectors() -> None:
    """Random123's kat_vectors for philox 4x32 10 (Salmon et al. 2011)."""
    assert words((0, 0, 0, 0), 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    most = 0xFFFFFFFF
    assert words((most, most, most, most), 2**64 - 1) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert words((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0_A4093822) == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


def test_broadcasts() -> None:
    counters = np.arange(5, dtype=np.uint64)[None, :]
    zero = np.zeros((1, 1), np.uint64)
    keys = np.array([[0], [7]], np.uint64)
    table = philox((counters, zero, zero, zero), keys)
    assert table.shape == (2, 5, 4)
    assert table[1, 3].tolist() == words((3, 0, 0, 0), 7)


def test_gumbel_is_finite_and_right() -> None:
    edges = gumbel(np.array([0, 0xFFFFFFFF], np.uint64))
    assert np.isfinite(edges).all()
    assert edges[0] < -3 < 20 < edges[1]
    zero = np.zeros(1, np.uint64)
    noise = gumbel(philox((np.arange(250_000, dtype=np.uint64), zero, zero, zero), zero)).ravel()
    assert abs(noise.mean() - 0.5772157) < 0.005  # Euler's constant
    assert abs(noise.var() - np.pi**2 / 6) < 0.02
