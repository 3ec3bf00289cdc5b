"""Configuration: from file, environment and options; all that is wrong at once; the reference as the code has it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from bursar.config import PREFIX, Config, ConfigRefused, read, secret

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def rows_of(config: Config) -> list[str]:
    """The reference's rows, as the code has them."""
    rows = []
    for setting in fields(config):
        default = getattr(config, setting.name)
        text = str(default).lower() if isinstance(default, bool) else default
        shown = f"`{text}`" if default not in ("", {}, ()) else ""
        rows.append(f"| `{setting.name}` | {shown} | {setting.metadata['what']} |")
    return rows


def problems(file: str = "", environ: dict[str, str] | None = None, **given: Any) -> str:
    with pytest.raises(ConfigRefused) as refused:
        read(file, environ, **given)
    return str(refused.value)


def test_the_reference_lists_every_setting_and_no_other() -> None:
    text = (REFERENCE / "configuration.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("| `")] == rows_of(Config())


def test_names_of_specification_001_are_kept() -> None:
    assert {"scan_interval_ms", "retry_backoff_ms", "alert_threshold"} <= {setting.name for setting in fields(Config)}


def test_the_later_source_wins(tmp_path: Path) -> None:
    """File, then environment, then options."""
    file = tmp_path / "bursar.toml"
    file.write_text('listen = "0.0.0.0:1"\nrequests_max = 7\nalert_threshold = 3\nlimit_amount_per_day = {USDT = 5}\n')
    environ = {"BURSAR_REQUESTS_MAX": "8", "BURSAR_ALERT_THRESHOLD": "4", "PATH": "/bin", "BURSAR_TRACEBACK": "1"}
    config = read(str(file), environ, alert_threshold=5, data=None)
    assert (config.listen, config.requests_max, config.alert_threshold) == ("0.0.0.0:1", 8, 5)
    assert (config.limit_amount_per_day, config.data) == ({"USDT": 5}, "bursar-data")
    named = read(environ={"BURSAR_DEPOSIT_CONFIRM_ABOVE": "USDT=100, BTC=7"})
    assert named.deposit_confirm_above == {"USDT": 100, "BTC": 7}


def test_everything_wrong_is_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bursar.toml"
    file.write_text('requests_mx = 7\nlisten = "nowhere"\njwt_algorithm = "none"\n')
    environ = {"BURSAR_SCAN_INTERVAL_MS": "soon", "BURSAR_CORE_SPOT": "core", "BURSAR_RETRY_BACKOFF_MS": "-1"}
    said = problems(str(file), environ)
    assert f"requests_mx in {file} is no setting; did you mean requests_max?" in said
    assert "HOST:PORT is needed" in said
    assert "one of HS256, EdDSA is needed" in said
    assert "BURSAR_SCAN_INTERVAL_MS: a whole number from 10 to 60000 is needed" in said
    assert "BURSAR_CORE_SPOT: unix:PATH, tcp:HOST:PORT, child, or nothing" in said
    assert "BURSAR_RETRY_BACKOFF_MS" in said
    assert said.count(";") == 6


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"database": "postgresql://db/x"}, "every host would start a core of its own"),
        ({"database": "postgresql://db/x"}, "jwt_key_file is needed with PostgreSQL"),
        ({"database": "mysql://db/x"}, "sqlite:///FILE or postgresql://"),
        ({"core_spot": "tcp:core:7000"}, "core_spot_secret_file is needed"),
        ({"core_spot": ""}, "no core is switched on"),
        ({"jwt_algorithm": "EdDSA"}, "jwt_key_file is needed with EdDSA"),
        ({"retry_backoff_ms": 1000, "retry_backoff_max_ms": 10}, "retry_backoff_max_ms is below"),
        ({"data": "/" + "x" * 120}, "too long for a Unix socket"),
        ({"requests_max": True}, "whole number"),
        ({"requests_max": 1.5}, "whole number"),
        ({"limit_amount_per_day": {"USDT": -1}}, "whole number"),
        ({"deposit_confirm_above": "USDT"}, "whole number"),
        ({"alert_webhook": "https://pager.internal/hook"}, "alert_webhook_secret_file is needed"),
        ({"screening_url": "https://screen.internal/"}, "screening_secret_file is needed"),
        ({"alert_webhook": "ftp://pager.internal/hook"}, "https://… is needed"),
        ({"alert_webhook": "https:///hook"}, "https://… is needed"),
        ({"alert_webhook": "https://pager:port/"}, "https://… is needed"),
        ({"alert_webhook": "https://pager/a b"}, "https://… is needed"),
        ({"alert_webhook": "https://me:secret@pager/"}, "no name or password"),
        ({"alert_command": "notify --now"}, "a list of words is needed"),
        ({"alert_command": ["notify", 1]}, "a list of words is needed"),
        ({"alert_command": [""]}, "no name"),
        ({"alert_timeout_ms": 0}, "whole number"),
    ],
)
def test_what_contradicts_is_refused(settings: dict[str, Any], why: str) -> None:
    assert why in problems(**settings)


def test_a_command_is_a_list_in_the_file_and_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "bursar.toml"
    file.write_text('alert_command = ["notify", "a b"]')
    assert read(str(file)).alert_command == ("notify", "a b")
    assert read(environ={"BURSAR_ALERT_COMMAND": '["page", "$HOME"]'}).alert_command == ("page", "$HOME")
    assert read(environ={"BURSAR_ALERT_COMMAND": ""}).alert_command == ()


def test_a_file_that_is_none(tmp_path: Path) -> None:
    assert "can't be read" in problems(str(tmp_path / "none.toml"))
    (tmp_path / "odd.toml").write_text("= 1")
    assert "is not TOML" in problems(str(tmp_path / "odd.toml"))


def test_many_hosts_and_further_cores() -> None:
    """With PostgreSQL and addresses, FUTURE and MARGIN are further cores."""
    cores: dict[str, Any] = {}
    for kind in ("spot", "future", "margin"):
        cores |= {f"core_{kind}": f"tcp:{kind}.internal:7000", f"core_{kind}_secret_file": f"/etc/{kind}"}
    config = read(database="postgresql://db/x", jwt_key_file="/etc/key", **cores)
    assert config.cores == ["spot", "future", "margin"]
    assert (config.core_address("future"), config.core_secret_file("future")) == (
        "tcp:future.internal:7000",
        "/etc/future",
    )
    assert not config.is_embedded


def test_a_secret_that_other_users_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"x" * 40 + b"\n")
    file.chmod(0o600)
    assert secret(str(file), "it", 32) == b"x" * 40
    file.chmod(0o604)
    with pytest.raises(ConfigRefused, match="chmod 600"):
        secret(str(file), "it", 32)
    file.chmod(0o600)
    with pytest.raises(ConfigRefused, match="at least 41"):
        secret(str(file), "it", 41)


def test_every_setting_can_be_given_by_environment() -> None:
    for setting in fields(Config):
        given = {PREFIX + setting.name.upper(): ""}
        try:
            read(environ=given)
        except ConfigRefused as refused:
            assert "is no setting" not in str(refused)


PAYING: dict[str, Any] = {
    "signer": "unix:/run/signer.sock",
    "signer_name": "hot",
    "signer_caller": "payouts",
    "signer_secret_file": "/etc/bursar/payouts.secret",
    "chain_nodes": {"bsc": ["https://one.example/v3/k3y-one", "https://two.example"]},
}


def test_nodes_are_a_table_in_the_file_and_json_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "bursar.toml"
    rest = {name: value for name, value in PAYING.items() if name != "chain_nodes"}
    file.write_text('[chain_nodes]\nbsc = ["https://one", "https://two"]\neth-1 = ["http://three:8545"]\n')
    found = read(str(file), **rest)
    assert found.chain_nodes == {"bsc": ("https://one", "https://two"), "eth-1": ("http://three:8545",)}
    named = read(environ={"BURSAR_CHAIN_NODES": '{"bsc": ["https://one"]}'}, **rest)
    assert (named.chain_nodes, named.pays_out) == ({"bsc": ("https://one",)}, True)
    assert not read().pays_out


def test_urls_of_nodes_are_in_no_text() -> None:
    assert "k3y-one" not in repr(read(**PAYING))
    urls = ["https://one.example/k3y-one", "ftp://two.example/k3y-two"]
    assert "k3y" not in problems(**PAYING | {"chain_nodes": {"bsc": urls}})
    assert "k3y" not in problems(environ={"BURSAR_CHAIN_NODES": '{"bsc": ["https://k3y"'})


@pytest.mark.parametrize("missing", sorted(PAYING))
def test_payouts_are_configured_whole_or_not_at_all(missing: str) -> None:
    given = {name: value for name, value in PAYING.items() if name != missing}
    assert f"{missing} is needed for payouts" in problems(**given)


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ({"bsc": []}, "bsc: 1 to 16 nodes are needed"),
        ({"bsc": ["one"]}, "bsc: node 1 is not http"),
        ({"tron": ["http://one#8091", "http://two#port"]}, "tron: node 2: a port stands behind #"),
        ({"bsc": ["https://one", 2]}, "bsc: node 2 is not http"),
        ({"bsc": ["https://one", "https://one"]}, "its own witness"),
        ({"BSC": ["https://one"]}, "not the name of a chain's document"),
        ({"bsc": "https://one"}, "a list of URLs per chain is needed"),
        ("bsc=https://one", "a list of URLs per chain is needed"),
    ],
)
def test_nodes_that_are_none_are_refused(nodes: Any, why: str) -> None:
    assert why in problems(**PAYING | {"chain_nodes": nodes})


def test_signer_without_an_address_is_refused() -> None:
    assert "unix:PATH or tcp:HOST:PORT is needed" in problems(**PAYING | {"signer": "signer.internal"})
