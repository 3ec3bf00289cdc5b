"""Configuration: one list of settings, read once at start from a TOML file and from the environment.

`Config` is the list: every field is a setting with its default, how it is read, and what it is for; `docs/reference/
configuration.md` says the same, and a test holds the two together. The environment wins over the file: `BURSAR_` and
the name in capitals. Whatever is wrong (an unknown name, a value out of bounds, two settings that contradict each
other) is refused before anything is opened, all of it at once.

Files are read here directly, not through the ports: it happens before there is anything that could be simulated.
"""

from __future__ import annotations

import difflib
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bursar import config_readers as as_
from bursar.config_readers import Reader
from bursar.model.errors import Refusal
from bursar.signer import SECRET_BYTES_MIN
from bursar.store import Options

PREFIX = "BURSAR_"
# Read elsewhere, so not unknown: which file, tracebacks, what tests run on and how long.
OTHER_VARIABLES = frozenset(
    {"BURSAR_CONFIG", "BURSAR_TRACEBACK", "BURSAR_POSTGRES_BIN", "BURSAR_SIM_SEEDS", "BURSAR_TRADING_SEEDS"}
    | {"BURSAR_TRANSFERS_SEEDS", "BURSAR_RESTORED_SEEDS", "BURSAR_ENGINE_SEEDS", "BURSAR_FUZZ_EXAMPLES"}
    | {"BURSAR_ANVIL_BIN"}
)
CHILD = as_.CHILD
CORES = ("spot", "future", "margin")
UNIX_PATH_BYTES_MAX = 100  # 107 on Linux, 103 on macOS, with a little left
HS256_KEY_BYTES_MIN = 32
CORE_SECRET_BYTES_MIN = 16
WEBHOOK_SECRET_BYTES_MIN = 32
SIGNER_SECRET_BYTES_MIN = SECRET_BYTES_MIN
SCREENING_SECRET_BYTES_MIN = 32
MINUTE_MS = 60_000
ANSWER_S = 1.5  # for an answer, beyond the longest that it may have to wait for


class ConfigRefused(Refusal):
    """The configuration can't be used; every reason is named."""

    problems: str
    code = "CONFIG_REFUSED"
    text = "the configuration is refused: {problems}"


def setting(default: Any, read: Reader, what: str, *, is_secret: bool = False) -> Any:
    """A field of `Config`. What is secret, or may contain it, is not part of its text."""
    metadata = {"read": read, "what": what}
    if isinstance(default, dict):
        return field(default_factory=default.copy, repr=not is_secret, metadata=metadata)
    return field(default=default, repr=not is_secret, metadata=metadata)


def _core_setting(kind: str, default: str) -> Any:
    what = f"Where the {kind.upper()} core is: an address, `child` (started here), or nothing: not switched on."
    return setting(default, as_.core_address, what)


def _secret_setting(kind: str) -> Any:
    return setting("", as_.text, f"File with the secret of the {kind.upper()} core; a child's is made at first start.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every setting there is."""

    data: str = setting(
        "bursar-data",
        as_.text,
        "Folder for what `bursar serve` makes by itself: database, secrets, the child core's log.",
    )
    database: str = setting(
        "",
        as_.database_url,
        "`sqlite:///FILE` or `postgresql://…`; empty: `bursar.db` in the data folder.",
        is_secret=True,
    )
    database_timeout_ms: int = setting(
        5_000,
        as_.whole(50, 10 * MINUTE_MS),
        "PostgreSQL: how long one statement may take; then its connection is dropped and another one used. Not for "
        "migrations, audit and rebuild.",
    )
    require_synchronous: bool = setting(
        False,
        as_.yes_or_no,
        "PostgreSQL: refuse a server whose commits are not at a synchronous standby before they are answered: "
        "`synchronous_standby_names` empty, or `synchronous_commit` below `on`.",
    )
    listen: str = setting("127.0.0.1:8080", as_.host_port, "Where the API listens. Port 0: any that is free.")
    health_listen: str = setting(
        "", as_.optional(as_.host_port), "Where health and metrics are, and nowhere else. Empty: at `listen`."
    )
    worker_name: str = setting(
        "",
        as_.text,
        "Who drives a record, in its history. Empty: made of host and data folder; no two processes share it.",
    )
    log_level: str = setting("warning", as_.one_of("debug", "info", "warning", "error"), "What is logged, to stderr.")

    core_spot: str = _core_setting("spot", CHILD)
    core_spot_secret_file: str = _secret_setting("spot")
    core_future: str = _core_setting("future", "")
    core_future_secret_file: str = _secret_setting("future")
    core_margin: str = _core_setting("margin", "")
    core_margin_secret_file: str = _secret_setting("margin")
    core_timeout_ms: int = setting(5_000, as_.whole(10, MINUTE_MS), "How long a core may take to answer a call.")

    core_room_after_s: int = setting(
        3_600,
        as_.whole(600, 86_400),
        "Age at which a core stops reserving room for the refund of a withdraw; open transfers keep theirs.",
    )
    core_forget_after_s: int = setting(
        604_800,
        as_.whole(3_600, 400 * 86_400),
        "Age at which a core forgets operations: as old as any backup of the database that may be restored.",
    )
    prune_interval_s: int = setting(
        300,
        as_.whole(0, 86_400),
        "Between two times at which the floors of cores are raised, below which they forget; 0: never.",
    )

    jwt_algorithm: str = setting(
        "HS256", as_.one_of("HS256", "EdDSA"), "The one algorithm that tokens may be signed with; a token can't choose."
    )
    jwt_key_file: str = setting(
        "",
        as_.text,
        f"HS256: the secret, at least {HS256_KEY_BYTES_MIN} bytes. EdDSA: the public key, PEM. Empty, with SQLite and "
        "HS256: made at first start.",
    )
    jwt_issuer: str = setting("", as_.text, "If given, tokens must name it as `iss`.")
    jwt_audience: str = setting("", as_.text, "If given, tokens must name it as `aud`.")
    jwt_leeway_s: int = setting(0, as_.whole(0, 300), "How far the clock of the issuer of tokens may be off.")

    connections_max: int = setting(
        4_096,
        as_.whole(1, 60_000),
        "Open connections; fewer if the limit of open files says so. Beyond, idle ones are closed for new ones.",
    )
    requests_max: int = setting(512, as_.whole(1, 100_000), "Requests in progress; beyond, the answer is 503.")
    requests_per_user_max: int = setting(
        64, as_.whole(0, 100_000), "Requests in progress of one user; beyond, the answer is 429. 0: no limit."
    )
    header_bytes_max: int = setting(
        16_384, as_.whole(1_024, 1_048_576), "Size of a request's address and headers; beyond, 431."
    )
    body_bytes_max: int = setting(16_384, as_.whole(256, 1_048_576), "Size of a request's body; beyond, 413.")
    header_timeout_ms: int = setting(
        10_000,
        as_.whole(10, 10 * MINUTE_MS),
        "How long the headers of a request may take, from its first byte; then 408.",
    )
    body_timeout_ms: int = setting(
        10_000,
        as_.whole(10, 10 * MINUTE_MS),
        "How long its body may take, and its answer to be read; then 408, or the end.",
    )
    idle_timeout_ms: int = setting(
        75_000, as_.whole(10, 60 * MINUTE_MS), "How long a connection is kept for the next request."
    )
    deadline_ms: int = setting(
        2_000,
        as_.whole(0, MINUTE_MS),
        "Within which a request is answered (500 at least); a transfer that takes longer is PENDING.",
    )
    shutdown_ms: int = setting(
        10_000,
        as_.whole(0, 10 * MINUTE_MS),
        "How long stopping may take in all after SIGTERM, whatever hangs (at least a second); the rest is found at "
        "next start.",
    )

    safety_factor: int = setting(2, as_.whole(1, 2**32), "Transfers stay below 2^64 divided by this (OVERFLOW).")
    limit_per_second: int = setting(
        10, as_.whole(0, 10**9), "Requests for transfers of one user in a second, refused ones too. 0: no limit."
    )
    limit_reads_per_second: int = setting(
        100, as_.whole(0, 10**9), "Requests to read of one user in a second; staff has no limit. 0: no limit."
    )
    limit_per_day: int = setting(100, as_.whole(0, 10**9), "Transfers of one user in a day (UTC). 0: no limit.")
    limit_amount_per_day: Mapping[str, int] = setting(
        {}, as_.amounts, "What one user may transfer in a day, per asset in smallest units: `USDT=1000000`."
    )
    deposit_confirm_above: Mapping[str, int] = setting(
        {}, as_.amounts, "Deposits above this, per asset in smallest units, wait for a second person. Others don't."
    )

    scan_interval_ms: int = setting(500, as_.whole(10, MINUTE_MS), "Between two looks for transfers that are due.")
    retry_backoff_ms: int = setting(200, as_.whole(1, MINUTE_MS), "Before the first repetition of a call; doubles.")
    retry_backoff_max_ms: int = setting(60_000, as_.whole(1, 60 * MINUTE_MS), "What it doubles to at most.")
    alert_threshold: int = setting(10, as_.whole(1, 1_000_000), "Calls without an answer before an alert is raised.")
    alert_after_s: int = setting(
        300, as_.whole(1, 86_400), "Age of an open transfer, in seconds, at which an alert is raised."
    )
    alert_waiting_s: int = setting(
        3_600,
        as_.whole(1, 30 * 86_400),
        "Seconds that a deposit may wait for a second person before an alert is raised.",
    )
    alert_paused_s: int = setting(
        3_600,
        as_.whole(0, 30 * 86_400),
        "Seconds after which a pause raises an alert, and again each time it doubles; 0: never.",
    )
    alert_webhook: str = setting(
        "", as_.webhook_url, "Where alerts are POSTed to, beside the log. Empty: nowhere.", is_secret=True
    )
    alert_webhook_secret_file: str = setting(
        "", as_.text, f"File with the secret that they are signed with, at least {WEBHOOK_SECRET_BYTES_MIN} bytes."
    )
    alert_command: tuple[str, ...] = setting(
        (), as_.words, "A program that gets each alert on its stdin: a list of words, in the environment as JSON."
    )
    alert_timeout_ms: int = setting(10_000, as_.whole(10, MINUTE_MS), "How long a webhook or a command may take.")
    audit_interval_s: int = setting(
        60,
        as_.whole(0, 86_400),
        "Between two looks at what must be conserved; 0: none. If it is not, no new transfers.",
    )
    hold_expiry_interval_ms: int = setting(
        5_000, as_.whole(10, 60 * MINUTE_MS), "Between two looks for holds whose time is up; they are given back."
    )
    worker_concurrency: int = setting(512, as_.whole(1, 100_000), "Transfers that the worker drives at once.")

    chain_nodes: dict[str, tuple[str, ...]] = field(
        default_factory=dict,
        repr=False,  # URLs of nodes often contain keys
        metadata={
            "read": as_.nodes,
            "what": "The nodes of each chain that is paid out on: URLs by the name of its document; in the environment "
            "as JSON. Two nodes must agree: name at least two of different operators. TRON: behind `#` stands the port "
            "of `walletsolidity`, if that is another. Never printed.",
        },
    )
    chain_timeout_ms: int = setting(
        5_000, as_.whole(50, MINUTE_MS), "How long a node may take to answer; then it has not answered."
    )
    signer: str = setting(
        "", as_.optional(as_.address), "Where the signer is: `unix:PATH` or `tcp:HOST:PORT`. Empty: no payouts here."
    )
    signer_name: str = setting("", as_.text, "Which signer it should be: the name in its policy.")
    signer_caller: str = setting("", as_.text, "As which caller of its policy we ask.")
    signer_secret_file: str = setting(
        "", as_.text, f"File with that caller's secret, at least {SIGNER_SECRET_BYTES_MIN} bytes."
    )
    signer_timeout_ms: int = setting(5_000, as_.whole(50, MINUTE_MS), "How long the signer may take to answer.")
    screening_url: str = setting(
        "",
        as_.webhook_url,
        "Where withdrawals are POSTed to whose policy asks for screening. Empty: people decide about them.",
        is_secret=True,
    )
    screening_secret_file: str = setting(
        "",
        as_.text,
        f"File with the secret that question and answer are signed with, at least {SCREENING_SECRET_BYTES_MIN} bytes.",
    )
    screening_timeout_ms: int = setting(
        5_000, as_.whole(50, MINUTE_MS // 2), "How long the screening may take; then it has not answered."
    )

    @property
    def pays_out(self) -> bool:
        """Whether this process drives payouts: a signer and nodes are configured."""
        return bool(self.signer)

    @property
    def database_url(self) -> str:
        """The database, also where none was named."""
        return self.database or f"sqlite:///{Path(self.data).absolute()}/bursar.db"

    @property
    def database_options(self) -> Options:
        """How the database is used."""
        return Options(statement_s=self.database_timeout_ms / 1000, require_synchronous=self.require_synchronous)

    @property
    def answer_s(self) -> float:
        """Within which every request is answered, whatever hangs."""
        return max(self.deadline_ms, self.database_timeout_ms, self.core_timeout_ms) / 1000 + ANSWER_S

    @property
    def is_embedded(self) -> bool:
        """Whether this host is all there is."""
        return self.database_url.startswith("sqlite:")

    def core(self, kind: str) -> str:
        """A core's setting: an address, `child`, or nothing."""
        return str(getattr(self, f"core_{kind}"))

    def core_address(self, kind: str) -> str:
        """Where a core is, also if it is a child."""
        address = self.core(kind)
        return f"unix:{Path(self.data).absolute()}/{kind}.sock" if address == CHILD else address

    def core_secret_file(self, kind: str) -> str:
        """Where its secret is."""
        return str(getattr(self, f"core_{kind}_secret_file")) or str(Path(self.data).absolute() / "core.secret")

    @property
    def cores(self) -> list[str]:
        """The cores that are switched on."""
        return [kind for kind in CORES if self.core(kind)]

    @property
    def key_file(self) -> str:
        """Where the key of tokens is, also where none was named."""
        return self.jwt_key_file or str(Path(self.data).absolute() / "jwt.key")


def read(file: str = "", environ: Mapping[str, str] | None = None, **given: Any) -> Config:
    """The configuration of a file, of the environment and of options, of which the later wins; or all that is wrong."""
    problems: list[str] = []
    config = _made([*_of_file(file, problems), *_of_environment(environ or {}), *_of_options(given)], problems)
    problems += _contradictions(config)
    if problems:
        raise ConfigRefused("; ".join(problems))
    return config


def _made(found: list[tuple[str, str, Any]], problems: list[str]) -> Config:
    """What these settings say, of which the later wins: each with its source, its name and its raw value."""
    values: dict[str, Any] = {}
    known = {f.name: f for f in fields(Config)}
    for source, name, raw in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"{source} is no setting{hint}")
            continue
        try:
            values[name] = known[name].metadata["read"](raw)
        except ValueError as error:
            problems.append(f"{source}: {error}")
    return Config(**values)


def options_of(environ: Mapping[str, str]) -> Options:
    """How a command that is given a database and no configuration uses it: as the environment says, like all others."""
    ours = {f"{PREFIX}{name.upper()}" for name in ("database_timeout_ms", "require_synchronous")}
    problems: list[str] = []
    config = _made(_of_environment({name: raw for name, raw in environ.items() if name in ours}), problems)
    if problems:
        raise ConfigRefused("; ".join(problems))
    return config.database_options


def secret(path: str, what: str, least_bytes: int, *, is_public: bool = False) -> bytes:
    """A secret from a file that only its owner and group can read, all of it but a newline at its end."""
    file = Path(path)
    try:
        found, mode = file.read_bytes().rstrip(b"\r\n"), file.stat().st_mode
    except OSError as error:
        raise ConfigRefused(f"{what}: {path} can't be read: {error.strerror}") from None
    if mode & stat.S_IRWXO and not is_public:
        raise ConfigRefused(f"{what}: every user of this machine can read {path}: chmod 600 {path}")
    if len(found) < least_bytes:
        raise ConfigRefused(f"{what}: {path} has {len(found)} bytes; at least {least_bytes} are needed")
    return found


def _of_file(file: str, problems: list[str]) -> list[tuple[str, str, Any]]:
    if not file:
        return []
    try:
        found = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{file} can't be read: {error.strerror}")
        return []
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{file} is not TOML: {error}")
        return []
    return [(f"{name} in {file}", name, raw) for name, raw in found.items()]


def _of_environment(environ: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    ours = [name for name in sorted(environ) if name.startswith(PREFIX) and name not in OTHER_VARIABLES]
    return [(name, name.removeprefix(PREFIX).lower(), environ[name]) for name in ours]


def _of_options(given: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    return [(f"--{name.replace('_', '-')}", name, raw) for name, raw in given.items() if raw is not None]


def _contradictions(config: Config) -> list[str]:
    """What is right by itself and wrong together."""
    found = []
    if not config.cores:
        found.append("no core is switched on: set core_spot, core_future or core_margin")
    for kind in config.cores:
        address = config.core(kind)
        if address == CHILD and not config.is_embedded:
            found.append(
                f"core_{kind} is {CHILD}, but the database is PostgreSQL: every host would start a core of its own and "
                f"they would not agree; run `bursar core` once and give its address"
            )
        if address != CHILD and not getattr(config, f"core_{kind}_secret_file"):
            found.append(f"core_{kind} has an address, so core_{kind}_secret_file is needed")
        path = config.core_address(kind)
        if path.startswith("unix:") and len(path.encode()) > UNIX_PATH_BYTES_MAX:
            found.append(f"core_{kind}: {path} is too long for a Unix socket ({UNIX_PATH_BYTES_MAX} bytes at most)")
    if not config.jwt_key_file and not config.is_embedded:
        found.append("jwt_key_file is needed with PostgreSQL: all hosts must know the same key")
    if not config.jwt_key_file and config.jwt_algorithm == "EdDSA":
        found.append("jwt_key_file is needed with EdDSA: the public key of the issuer of tokens")
    if config.alert_webhook and not config.alert_webhook_secret_file:
        found.append("alert_webhook is given, so alert_webhook_secret_file is needed: alerts are signed with it")
    if config.screening_url and not config.screening_secret_file:
        found.append("screening_url is given, so screening_secret_file is needed: questions and answers are signed")
    if config.core_forget_after_s < config.core_room_after_s:
        found.append("core_forget_after_s is below core_room_after_s")
    if config.require_synchronous and config.is_embedded:
        found.append("require_synchronous is for PostgreSQL: a SQLite file has no standby")
    if config.retry_backoff_max_ms < config.retry_backoff_ms:
        found.append("retry_backoff_max_ms is below retry_backoff_ms")
    return found + _unfinished_payouts(config)


def _unfinished_payouts(config: Config) -> list[str]:
    """Payouts need all of it: where a part is given, the others that are missing are named."""
    needed = ("signer", "signer_name", "signer_caller", "signer_secret_file", "chain_nodes")
    given = [name for name in needed if getattr(config, name)]
    return [f"{given[0]} is given, so {name} is needed for payouts" for name in needed if given and name not in given]
