"""Keys of `bursar signer`: the keystore of a signer, and an approver's own key and signatures.

Secrets are read from a file or at the terminal, never from the command line or the environment, which other processes
of the machine can see. None is printed, but for new words that are asked for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from bursar.cli.output import Output, shown, table
from bursar.cli.state import Command, State
from bursar.model.authorizations import Approval, Payment, Release, Unhalt

T = TypeVar("T")

SECRET_BYTES_MIN = 1

passphrase_option = click.option(
    "--passphrase-file", metavar="FILE", help="The passphrase; asked for at the terminal without it."
)
keystore_option = click.option("--keystore", metavar="FILE", required=True, help="The encrypted file.")


def passphrase(file: str | None, prompt: str, *, new: bool = False) -> bytearray:
    """A passphrase from a file that only its owner reads, or from the terminal."""
    if file is not None:
        return _secret(file, "--passphrase-file")
    if not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask for a passphrase: name a file with --passphrase-file")
    return bytearray(click.prompt(prompt, hide_input=True, confirmation_prompt=new, err=True).encode())


def _secret(file: str, option: str) -> bytearray:
    from bursar.config import ConfigRefused, secret

    try:
        return bytearray(secret(file, option, SECRET_BYTES_MIN))
    except ConfigRefused as error:
        raise click.UsageError(error.problems) from None


def read_struct(file: str, kind: type[T], *, part: str = "") -> T:
    """A payment, a release, the end of a halt or an approval from a JSON file; `-`: standard input. `part`: what may
    also be a part of that name, as in an answer of the API."""
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        read = msgspec.json.decode(data)
        inside = read.get(part) if part and isinstance(read, dict) else None
        return msgspec.convert(read if inside is None else inside, kind)
    except msgspec.MsgspecError as error:
        raise click.UsageError(f"{file} is not a {kind.__name__}: {error}") from None


def approval_files(files: tuple[str, ...]) -> list[Approval]:
    """Approvals, each in a file."""
    return [read_struct(file, Approval) for file in files]


def _out(ctx: click.Context) -> Output:
    return Output(as_json=ctx.ensure_object(State).json)


# --- the keystore


@click.command(
    cls=Command,
    examples="""
    bursar signer create --keystore /var/lib/bursar-signer/keystore.json --name main
    bursar signer create --keystore K --name main --path "m/44'/60'/0'/0/0" --path "m/44'/60'/0'/0/1" --show-words
    """,
)
@keystore_option
@click.option("--name", metavar="NAME", required=True, help="What the policy calls it.")
@click.option("--kind", type=click.Choice(["mnemonic", "key"]), default="mnemonic", show_default=True)
@click.option("--path", "paths", metavar="PATH", multiple=True, help="Derivation paths to list; the default: BIP-44.")
@click.option("--show-words", is_flag=True, help="Print the new words once, to be written down.")
@passphrase_option
@click.pass_context
def create(
    ctx: click.Context,
    keystore: str,
    name: str,
    kind: str,
    paths: tuple[str, ...],
    show_words: bool,
    passphrase_file: str | None,
) -> int:
    """Make a new secret in a keystore: 24 words of BIP-39, or one private key. A keystore is made if there is none."""
    from bursar.ports import SystemPorts
    from bursar.signer.keystore import new_mnemonic, new_private_key

    token = SystemPorts().token
    secret = new_mnemonic(token) if kind == "mnemonic" else new_private_key(token)
    words = secret.decode() if show_words else ""
    _add(ctx, keystore, name, secret, paths, passphrase_file)
    if words:
        click.echo(f"Write this down, and keep it where no computer reads it: {words}", err=True)
    return 0


@click.command(
    cls=Command,
    name="import",
    examples="bursar signer import --keystore K --name old --secret-file words.txt",
)
@keystore_option
@click.option("--name", metavar="NAME", required=True, help="What the policy calls it.")
@click.option(
    "--secret-file", metavar="FILE", help="BIP-39 words or a private key; asked for at the terminal without it."
)
@click.option("--path", "paths", metavar="PATH", multiple=True, help="Derivation paths to list; the default: BIP-44.")
@passphrase_option
@click.pass_context
def import_(
    ctx: click.Context,
    keystore: str,
    name: str,
    secret_file: str | None,
    paths: tuple[str, ...],
    passphrase_file: str | None,
) -> int:
    """Take words or a private key that exist already into a keystore."""
    if secret_file is not None:
        secret = _secret(secret_file, "--secret-file")
    elif sys.stdin.isatty():
        secret = bytearray(click.prompt("Words or private key", hide_input=True, err=True).encode())
    else:
        raise click.UsageError("there is no terminal to ask for the secret: name a file with --secret-file")
    _add(ctx, keystore, name, secret, paths, passphrase_file)
    return 0


def _add(
    ctx: click.Context, file: str, name: str, secret: bytearray, paths: tuple[str, ...], passphrase_file: str | None
) -> None:
    from bursar.ports import SystemPorts
    from bursar.signer import vault
    from bursar.signer.keystore import Keystore, open_keystore

    ports = SystemPorts()
    files = ports.files()
    is_new = not vault.exists(files, file)
    phrase = passphrase(passphrase_file, "Passphrase of the keystore", new=is_new)
    store = Keystore(file, {}, {}) if is_new else open_keystore(files, file, phrase)
    try:
        listed = store.add(name, secret, paths)
        store.save(files, phrase, ports.token)
    finally:
        store.wipe()
        vault.wipe(secret)
        vault.wipe(phrase)
    rows = [(listed.name, path, address) for path, address in listed.addresses.items()]
    _out(ctx).show(msgspec.to_builtins(listed), lambda: table("key", "path", "address", rows=rows))


@click.command(cls=Command, name="list", examples="bursar signer list --keystore K")
@keystore_option
@click.pass_context
def list_(ctx: click.Context, keystore: str) -> int:
    """List names, addresses and derivation paths of a keystore. Needs no passphrase, and shows no secret."""
    from bursar.ports import SystemPorts
    from bursar.signer.keystore import list_keys

    found = list_keys(SystemPorts().files(), keystore)
    rows = [(key.name, key.kind, path, address) for key in found for path, address in key.addresses.items()]
    _out(ctx).show(
        [msgspec.to_builtins(key) for key in found], lambda: table("key", "kind", "path", "address", rows=rows)
    )
    return 0


@click.command(
    cls=Command, examples="bursar signer rotate --keystore K --passphrase-file old --new-passphrase-file new"
)
@keystore_option
@passphrase_option
@click.option("--new-passphrase-file", metavar="FILE", help="The new one; asked for at the terminal without it.")
@click.pass_context
def rotate(ctx: click.Context, keystore: str, passphrase_file: str | None, new_passphrase_file: str | None) -> int:
    """Encrypt a keystore under another passphrase. A crash leaves the old file or the new one, whole."""
    from bursar.ports import SystemPorts
    from bursar.signer import vault
    from bursar.signer.keystore import rotate as encrypt_again

    ports = SystemPorts()
    old = passphrase(passphrase_file, "Old passphrase")
    new = passphrase(new_passphrase_file, "New passphrase", new=True)
    try:
        encrypt_again(ports.files(), keystore, old, new, ports.token)
    finally:
        vault.wipe(old)
        vault.wipe(new)
    _out(ctx).show(
        {"keystore": keystore}, lambda: f"{keystore} has a new passphrase; old copies still open with the old one"
    )
    return 0


@click.command(
    cls=Command,
    examples="""
    bursar signer xpub main --path "m/44'/60'/1'" --keystore /var/lib/bursar-signer/keystore.json
    bursar signer xpub main --path "m/44'/195'/1'" --keystore K --passphrase-file phrase --json
    """,
)
@click.argument("name", metavar="NAME")
@click.option("--path", metavar="PATH", required=True, help="As in [deposits.…] of the policy; its last part has a '.")
@keystore_option
@passphrase_option
@click.pass_context
def xpub(ctx: click.Context, name: str, path: str, keystore: str, passphrase_file: str | None) -> int:
    """Print the extended public key of a path, from which a server derives users' addresses for deposits.

    Of the mnemonic NAME. It makes addresses and no signatures. It is no secret, but who has it can find out whose
    addresses they are. The first address is printed, too: the server must show the same one for user 1.
    """
    from bursar.ports import SystemPorts
    from bursar.rails.derivation import user_path
    from bursar.signer import vault
    from bursar.signer.curve import evm_address, tron_address
    from bursar.signer.keystore import open_keystore
    from bursar.signer.wallets import check_section_path

    try:
        check_section_path(path)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    phrase = passphrase(passphrase_file, "Passphrase of the keystore")
    try:
        store = open_keystore(SystemPorts().files(), keystore, phrase)
    finally:
        vault.wipe(phrase)
    try:
        key = store.extended_key(name, path)
    finally:
        store.wipe()
    first = key.of_user(1).public_key[1:]
    found = {"key": name, "path": path, "xpub": key.text, "evm": evm_address(first), "tron": tron_address(first)}
    where = f"{path}/{user_path(1)}"
    lines = (key.text, f"user 1, on EVM chains:  {found['evm']}  ({where})", f"user 1, on TRON:        {found['tron']}")
    _out(ctx).show(found, lambda: "\n".join(lines))
    return 0


# --- approvers


@click.command(
    cls=Command, name="approver-key", examples="bursar signer approver-key --file ~/bursar/ann.key --name ann"
)
@click.option("--file", "file", metavar="FILE", required=True, help="Where the key is kept, encrypted.")
@click.option("--name", metavar="NAME", required=True, help="The approver's name in the policy.")
@passphrase_option
@click.pass_context
def approver_key(ctx: click.Context, file: str, name: str, passphrase_file: str | None) -> int:
    """Make an approver's own key, on the approver's own machine. Prints the public half, for the signer's policy."""
    from bursar.ports import SystemPorts
    from bursar.signer.approvals import create_key

    ports = SystemPorts()
    phrase = passphrase(passphrase_file, "Passphrase of the key", new=True)
    public = create_key(ports.files(), file, name, phrase, ports.token)
    text = f'[approvers.{name.lower()}]\npublic_key = "{public}"'
    _out(ctx).show({"approver": name.lower(), "public_key": public}, lambda: text)
    return 0


@click.command(
    cls=Command,
    examples="""
    bursar signer approve --key ~/bursar/ann.key payment.json > ann.json
    bursar signer approve --key ~/bursar/ann.key --kind release release.json > ann.json
    """,
)
@click.option("--key", metavar="FILE", required=True, help="The approver's key.")
@click.option(
    "--kind",
    type=click.Choice(["payment", "release", "unhalt"]),
    default="payment",
    show_default=True,
    help="What it is.",
)
@click.option("--yes", is_flag=True, help="Do not ask; for programs that have asked.")
@click.argument("file", metavar="FILE|-", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@passphrase_option
@click.pass_context
def approve(ctx: click.Context, key: str, kind: str, yes: bool, file: str, passphrase_file: str | None) -> int:
    """Show a payment in every detail, ask, and sign it. Prints the approval as JSON, for the payout or withdrawal.

    FILE is what `bursar withdrawal payment` or `GET /api/v1/withdrawals/{id}/payment` says.
    Also for the release of a payout whose attempts are dead, and for the end of a halt.
    """
    from bursar.flows.payouts.words import on_chain
    from bursar.ports import SystemPorts
    from bursar.signer.approvals import approve as sign

    kinds: dict[str, type[Payment] | type[Release] | type[Unhalt]]
    kinds = {"payment": Payment, "release": Release, "unhalt": Unhalt}
    what = read_struct(file, kinds[kind], part=kind)
    if isinstance(what, Payment):
        try:
            click.echo(
                f"{'pays':>12}  {shown(f'{on_chain(what)} {what.asset} to {what.to} on {what.chain}')}", err=True
            )
        except ValueError as error:
            raise click.UsageError(f"{file} is no payment: {error}") from None
    for name, value in msgspec.to_builtins(what).items():
        click.echo(f"{name:>12}  {value!r}", err=True)
    if isinstance(what, Payment):
        click.echo(f"{'digest':>12}  {what.digest()}", err=True)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("there is no terminal to ask at: say --yes if a person has seen it")
        click.confirm(f"Approve this {kind}?", abort=True, err=True)
    phrase = passphrase(passphrase_file, "Passphrase of the key")
    made = sign(SystemPorts().files(), key, phrase, what)
    _out(ctx).line(msgspec.to_builtins(made), msgspec.json.encode(made).decode())
    return 0
