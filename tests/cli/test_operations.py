"""`nori scale` and `nori rollout restart` against a real admin server over a fake backend."""

import json

import pytest
from fakes.admin import FakeAdminBackend

from nori_cluster.cli.main import main

pytestmark = pytest.mark.unit


def test_scale_waits(address: str, backend: FakeAdminBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "tiny", "3", "--admin", address]) == 0
    assert capsys.readouterr().out == "tiny has 3 groups\n"
    assert backend.asked == [("scale", "tiny", 3, False)]
    assert backend.looks > 1, "it returned before the operation was done"


def test_scale_without_waiting_and_only_asked(
    address: str, backend: FakeAdminBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", "tiny", "3", "--no-wait", "--admin", address]) == 0
    assert main(["scale", "tiny", "4", "--check", "--admin", address]) == 0
    assert capsys.readouterr().out == "tiny is getting 3 groups\ntiny can have 4 groups\n"
    assert backend.asked == [("scale", "tiny", 3, False), ("scale", "tiny", 4, True)]


def test_scale_that_cannot_be_or_fails_or_lasts(
    address: str, backend: FakeAdminBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", "other", "3", "--admin", address]) == 1
    assert "no model 'other'; there is: tiny" in capsys.readouterr().err
    assert main(["scale", "tiny", "-1", "--admin", address]) == 2
    backend.looks = -1000
    assert main(["scale", "tiny", "3", "--timeout", "0.2", "--admin", address]) == 1
    assert "scaling tiny to 3 groups is not done after 0.2 s and goes on" in capsys.readouterr().err
    backend.looks, backend.error_code = 0, 13
    assert main(["scale", "tiny", "3", "--admin", address]) == 1
    assert "scaling tiny to 3 groups failed: lost while draining" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["scale", "tiny", "0"],
        ["scale", "tiny", "10000000000"],
        ["rollout", "restart", "--max-unavailable", "10000000000"],
        ["rollout", "restart", "--grace", "inf"],
        ["drain", "tiny-0", "--grace", "1e300"],
    ],
)
def test_numbers_that_nobody_means(
    arguments: list[str], address: str, backend: FakeAdminBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--admin", address]) == 2
    assert "unexpected" not in capsys.readouterr().err
    assert (backend.asked, backend.drains) == ([], [])


def test_an_empty_name_is_no_model(address: str, backend: FakeAdminBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "restart", "", "--admin", address]) == 1
    assert "no model ''" in capsys.readouterr().err
    assert backend.asked == []


def test_rollout_restart_of_the_only_model(
    address: str, backend: FakeAdminBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout", "restart", "--grace", "2", "--max-unavailable", "2", "--admin", address]) == 0
    assert capsys.readouterr().out == "every group of tiny was restarted\n"
    assert main(["rollout", "restart", "tiny", "--json", "--admin", address]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["done"], shown["error_code"]) == ("restart-tiny", True, 0)
    assert backend.asked == [("restart", "tiny", 2, 2.0), ("restart", "tiny", 1, None)]


def test_rollout_alone_shows_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout"]) != 1
    assert "restart" in capsys.readouterr().out
