"""`bursar signer run`: the signer as a process, from its files to its end."""

from __future__ import annotations

import asyncio
import resource
import signal
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.commands.signer_keys import passphrase as ask_passphrase
from bursar.cli.errors import Unusable
from bursar.cli.output import Output, shown
from bursar.cli.state import Command, State
from bursar.model.errors import BursarError

if TYPE_CHECKING:
    from bursar.ports import Files
    from bursar.signer.server import Server
    from bursar.signer.service import Service
    from bursar.signer_setup import OwnNodes

LOCAL_SECRET, LOCAL_SOCKET = "local.secret", "local.sock"

data_option = click.option("--data", metavar="DIR", type=click.Path(file_okay=False), required=True, help="Its folder.")


@click.command(
    cls=Command,
    examples="""
    bursar signer run --data D --keystore D/keystore.json --policy policy.toml --listen unix:/run/signer.sock --new-log
    bursar signer run --data D --keystore D/keystore.json --policy policy.toml --listen tcp:10.0.0.5:7443
    """,
)
@data_option
@click.option("--keystore", metavar="FILE", required=True, help="The encrypted keys.")
@click.option("--passphrase-file", metavar="FILE", help="Its passphrase; asked for at the terminal without it.")
@click.option("--policy", "policy_file", metavar="FILE", required=True, help="What it may sign; read again at SIGHUP.")
@click.option(
    "--listen", metavar="ADDRESS", required=True, help="unix:PATH or tcp:HOST:PORT (port 0: any that is free)."
)
@click.option("--new-log", is_flag=True, help="The first time: make the log. A log that is lost is not made anew.")
@click.pass_context
def run(
    ctx: click.Context,
    data: str,
    keystore: str,
    passphrase_file: str | None,
    policy_file: str,
    listen: str,
    new_log: bool,
) -> int:
    """Run a signer until SIGTERM or SIGINT; it then answers what was asked, and exits with 0.

    It prints one line when it is ready. It ends with exit code 4, without a further answer, if its disk fails or its
    log is damaged, and says what to do.
    """
    from bursar.ports import split_address

    try:
        split_address(listen)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--listen") from error
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would have the keys in it
    secret = ask_passphrase(passphrase_file, "Passphrase of the keystore")
    out = Output(as_json=ctx.ensure_object(State).json)
    asyncio.run(_run(out, data, keystore, secret, policy_file, listen, new_log))
    return 0


async def _run(
    out: Output, data: str, keystore: str, secret: bytearray, policy_file: str, listen: str, new_log: bool
) -> None:
    from bursar import garbage
    from bursar.ports import SystemPorts
    from bursar.signer import vault
    from bursar.signer.codecs import codec_of
    from bursar.signer.keys import KeystoreKeys
    from bursar.signer.keystore import open_keystore
    from bursar.signer.server import Server
    from bursar.signer.service import Service
    from bursar.signer_setup import OwnNodes, read_policy

    ports = SystemPorts()
    policy, secrets, urls = read_policy(policy_file)
    keys = KeystoreKeys(open_keystore(ports.files(), keystore, secret))
    vault.wipe(secret)
    _check_folder(ports.files(), data)
    nodes = OwnNodes(ports, _log)
    try:
        service = await Service.open(ports, data, policy, keys, codec_of, witness=nodes.witness, new=new_log)
    except OSError as error:
        raise Unusable(f"can't use the folder {data}: {error.strerror or error}") from error
    garbage.relax_gc()  # what is remembered stays: the collector need not walk over it again and again
    if service.torn is not None:
        torn = service.torn
        _log(f"cut a torn end of {torn.size} bytes off the log, as a crash leaves it; kept in {torn.kept}")
    local = _local_secret(ports.files(), data, ports.token)
    server = Server(ports, service, secrets, local_secret=local, log=_log)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    loop.add_signal_handler(signal.SIGHUP, _read_again, service, server, nodes, policy_file)
    nodes.use(policy, urls)

    def ready(address: str) -> None:
        state = service.state
        fact = {"signer": state.name, "identity": state.identity, "listen": address, "sequence": state.sequence}
        halted = f", HALTED: {state.halted}" if state.halted else ""
        out.line(fact, f"signer {state.name} is ready at {address}: sequence {state.sequence:,}{halted}")

    try:
        await server.run(listen, f"unix:{data}/{LOCAL_SOCKET}", ready)
    except OSError as error:
        raise Unusable(f"can't listen at {listen}: {error.strerror or error}") from error
    finally:
        await nodes.close()
        service.close()
        keys.wipe()


def _read_again(service: Service, server: Server, nodes: OwnNodes, file: str) -> None:
    """SIGHUP: use the policy as it is now, or go on with the old one and say why."""
    from bursar.signer_setup import read_policy

    try:
        policy, secrets, urls = read_policy(file)
        service.use(policy)
    except BursarError as error:
        _log(f"the policy was not changed: {error}")
        return
    server.use(secrets)
    nodes.use(policy, urls)
    _log(f"the policy {file} was read again: {policy.digest}")


def _check_folder(files: Files, folder: str) -> None:
    files.make_folder(folder)
    if files.mode(folder) & 0o077:
        raise Unusable(f"other users may look into {folder}: chmod 700 {folder}")


def _local_secret(files: Files, folder: str, token: Any) -> bytes:
    """What the command on this host proves itself with, made once."""
    from bursar.signer import vault

    path = f"{folder}/{LOCAL_SECRET}"
    if not vault.exists(files, path):
        vault.write(files, path, (token() + token()).encode())
    return files.read(path)


def _log(text: str) -> None:
    click.echo(shown(text), err=True)
