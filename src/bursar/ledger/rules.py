"""Assets, books and accounts: what may move, and who may move it.

Every change of a rule bumps the rules' generation in the transaction that writes it. Commits in flight hold that row;
those validated before the bump fail and are decided again. So a freeze that has returned is a freeze that holds (L1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from bursar.model.accounts import (
    CORES,
    HELD,
    OF_FLOWS,
    Account,
    AccountStatus,
    Book,
    CappedOverdraft,
    Closing,
    NoOverdraft,
    Policy,
    changed,
    check_name,
    check_path,
    check_policy,
    close_may_freeze,
    encode_policy,
    floor_minor,
    funding_user,
    lifted,
    plain_text,
    same_policy,
)
from bursar.model.errors import (
    AccountClosed,
    AccountNotEmpty,
    AlreadyExists,
    Conflict,
    InvalidName,
    UnknownAccount,
    UnknownAsset,
    UnknownBook,
)
from bursar.model.money import Amount, Asset, AssetStatus, check_asset
from bursar.model.records import EventKind
from bursar.model.views import AccountVersion, moment
from bursar.store import Store
from bursar.store.tables import Tables

TRANSFERS = "transfers"  # the flow whose ends are users' funding accounts
LIMIT_MAX = 1_000_000  # rows of one page
MADE_TRIES = 3  # to make accounts that others are making


def check_limit(limit: int) -> int:
    """The same number of rows, or a refusal."""
    if type(limit) is not int or not 0 <= limit <= LIMIT_MAX:
        raise InvalidName("limit", str(limit), f"a whole number from 0 to {LIMIT_MAX:,}")
    return limit


class RuleBook:
    """Creates and changes assets, books and accounts."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._assets: dict[str, Asset] = {}
        self._books: dict[int, str] = {}  # names by number

    # --- assets ------------------------------------------------------------------------------------------------

    async def create_asset(
        self,
        code: str,
        precision: int,
        *,
        min_transfer: Amount | None = None,
        max_transfer: Amount | None = None,
        internal_transfer_enabled: bool | None = None,
    ) -> Asset:
        """Create an asset, or return it if it is there and is what was asked for.

        What is not said is as usual for a new asset, and as it is for one that is there. Anything else is refused:
        `change_asset` changes bounds and permission, and nothing changes a precision.
        """
        check_asset(code, precision)
        enabled = check_truth("internal_transfer_enabled", internal_transfer_enabled)
        asset = Asset(code=code, precision=precision, internal_transfer_enabled=enabled is not False)
        asset = _limits(asset, min_transfer, max_transfer)
        async with self.store.transaction() as unit:
            created = await unit.rules.create_asset(asset)
            found = (await unit.rules.assets())[code]
            if created:
                await unit.events.append(EventKind.ASSET_CREATED, found.id)
                await unit.rules.bump()
        self._assets = {}
        if not created:
            asked = {"precision": precision}
            asked |= {} if min_transfer is None else {"min_transfer": asset.min_transfer}
            asked |= {} if max_transfer is None else {"max_transfer": asset.max_transfer}
            asked |= {} if enabled is None else {"internal_transfer_enabled": enabled}
            _check_asked(found, asked)
        return found

    async def change_asset(
        self,
        code: str,
        *,
        status: AssetStatus | None = None,
        min_transfer: Amount | None = None,
        max_transfer: Amount | None = None,
        internal_transfer_enabled: bool | None = None,
    ) -> Asset:
        """Suspend or resume an asset, or move its transfer limits."""
        if status is not None and status not in tuple(AssetStatus):
            raise InvalidName("asset status", str(status), f"one of {', '.join(AssetStatus)}")
        enabled = check_truth("internal_transfer_enabled", internal_transfer_enabled)
        async with self.store.transaction() as unit:
            generation = await unit.rules.bump()
            old = find_asset(await unit.rules.assets(), code)
            asset = msgspec.structs.replace(
                _limits(old, min_transfer, max_transfer),
                status=old.status if status is None else AssetStatus(status),
                internal_transfer_enabled=old.internal_transfer_enabled if enabled is None else enabled,
            )
            await unit.rules.update_asset(asset)
            await unit.events.append(EventKind.ASSET_CHANGED, asset.id, generation % 2**31)
        self._assets = {}
        return asset

    async def assets(self) -> dict[str, Asset]:
        """All assets by code."""
        return await self.store.read.rules.assets()

    async def known_assets(self, *codes: str) -> dict[str, Asset]:
        """Assets from memory, if these are among them. Code and precision never change, so memory is good enough."""
        if not all(code in self._assets for code in codes):
            self._assets = await self.store.read.rules.assets()
        return self._assets

    async def _numbered(self, numbers: Iterable[int]) -> dict[int, Asset]:
        """Assets by number, from memory if these are in it."""
        known = {asset.id: asset for asset in self._assets.values()}
        if known.keys() >= set(numbers):
            return known
        return {asset.id: asset for asset in (await self.known_assets("")).values()}

    async def asset(self, code: str) -> Asset:
        """One asset, as it is now."""
        return find_asset(await self.assets(), code)

    # --- books -------------------------------------------------------------------------------------------------

    async def create_book(self, name: str, *, assets: tuple[str, ...] = (), accounts: tuple[str, ...] = ()) -> Book:
        """Create a book that admits only these assets and accounts (with all below them); empty: all."""
        name = check_name("book name", name)
        for what, names in (("assets", assets), ("accounts", accounts)):
            if not isinstance(names, tuple | list) or not all(isinstance(one, str) for one in names):
                raise InvalidName(f"list of {what}", str(names), "a tuple of texts is expected")
        wanted = Book(name=name, assets=tuple(assets), accounts=tuple([check_path(path) for path in accounts]))
        async with self.store.transaction() as unit:
            known = await unit.rules.assets()
            for code in wanted.assets:
                find_asset(known, code)
            created = await unit.rules.create_book(wanted)
            found = (await unit.rules.books())[name]
            if created:
                await unit.events.append(EventKind.BOOK_CREATED, found.id)
                await unit.rules.bump()
        for what, there, asked in (
            ("assets", found.assets, wanted.assets),
            ("accounts", found.accounts, wanted.accounts),
        ):
            if set(there) != set(asked):
                why = f"it admits {what} {', '.join(there) or 'of all names'}; books never change, so use another name"
                raise AlreadyExists("book", name, why)
        return found

    async def books(self) -> dict[str, Book]:
        """All books by name."""
        return await self.store.read.rules.books()

    async def _book_name(self, number: int) -> str:
        """The name of a book, which never changes."""
        if number not in self._books:
            self._books = {book.id: book.name for book in (await self.books()).values()}
        return self._books[number]

    # --- accounts ----------------------------------------------------------------------------------------------

    async def create_account(self, path: str, *, policy: Policy | None = None, book: str = "") -> Account:
        """Create an account, or return it if it is there with the same policy and book."""
        path = check_path(path)
        policy = NoOverdraft() if policy is None else policy
        book = check_name("book name", book) if book != "" else book
        async with self.store.transaction() as unit:
            await _check_policy(unit, policy, book)
            found = (await unit.accounts.heads([path])).get(path)
            if found is None:
                number = await unit.accounts.take_number()
                account = Account(id=number, path=path, policy=policy, book=book)
                if await unit.accounts.append(account):
                    await unit.events.append(EventKind.ACCOUNT_CREATED, number, 1)
                    return account
        if found is None:  # another caller created it at the same moment
            found = await self.account(path)
        if not same_policy(found.policy, policy):
            why = f"its policy is {encode_policy(found.policy)}; change it with `bursar account policy {path}`"
            raise AlreadyExists("account", path, why)
        if found.book != book:
            bound = f"it is bound to book {found.book}" if found.book else "it is bound to no book"
            raise AlreadyExists("account", path, f"{bound}, and that never changes")
        return found

    async def require_accounts(self, wanted: Mapping[str, Policy]) -> None:
        """See to it that these accounts are there, in one transaction. Those that are stay as they are."""
        for left in reversed(range(MADE_TRIES)):
            try:
                await self._require_accounts({check_path(path): policy for path, policy in wanted.items()})
                return
            except Conflict:  # another transaction has just made one of them: it is there now
                if not left:
                    raise

    async def _require_accounts(self, wanted: dict[str, Policy]) -> None:
        async with self.store.transaction() as unit:
            there = await unit.accounts.heads(wanted)
            missing = sorted(wanted.keys() - there.keys())  # in one order everywhere: others may make the same
            if not missing:
                return
            for policy in {wanted[path] for path in missing}:
                await _check_policy(unit, policy, "")
            numbers = await unit.accounts.take_numbers(len(missing))
            new = [Account(id=n, path=path, policy=wanted[path]) for n, path in zip(numbers, missing, strict=True)]
            if await unit.accounts.append(*new) < len(new):
                raise Conflict("an account was made by another transaction", 1)  # and nothing of this one is written
            await unit.events.append_all(EventKind.ACCOUNT_CREATED, numbers, 1)

    async def account(self, path: str) -> Account:
        """The newest version of an account."""
        path = check_path(path)
        found = (await self.store.read.accounts.heads([path])).get(path)
        if found is None:
            raise UnknownAccount(path)
        return found

    async def accounts(self, prefix: str = "", *, after: str = "", limit: int = 100) -> list[Account]:
        """Accounts by path, after one; with `prefix`, an account and all below it."""
        prefix = check_path(prefix) if prefix != "" else prefix
        return await self.store.read.accounts.list(prefix, plain_text("account path", after), check_limit(limit))

    async def account_history(self, path: str) -> list[AccountVersion]:
        """Every version of an account, oldest first."""
        found = await self.store.read.accounts.history(check_path(path))
        if not found:
            raise UnknownAccount(path)
        return [AccountVersion(account=version.account, at=moment(version.at_us)) for version in found]

    async def freeze(self, path: str) -> Account:
        """From the moment this returns nothing moves out or in, except what is given back or has happened outside."""
        return await self._change(path, status=AccountStatus.FROZEN)

    async def unfreeze(self, path: str) -> Account:
        """Undo a freeze."""
        return await self._change(path, status=AccountStatus.ACTIVE)

    async def change_policy(self, path: str, policy: Policy) -> Account:
        """A new policy. One that forbids owing is refused while the account owes."""
        return await self._change(path, policy=check_policy(policy))

    async def _change(
        self,
        path: str,
        *,
        status: AccountStatus | None = None,
        policy: Policy | None = None,
        transfers_seen: int | None = None,
    ) -> Account:
        path = check_path(path)
        if path == HELD:
            raise InvalidName("account path", path, "this account belongs to holds")
        if status is AccountStatus.CLOSED and path in OF_FLOWS:
            raise InvalidName("account to close", path, "flows book there what has happened outside")
        async with self.store.transaction() as unit:
            head, closing = await _locked(unit, path)
            if status is AccountStatus.CLOSED or policy is not None:
                await self._check_settled(unit)
            if status is AccountStatus.CLOSED:
                await _check_empty(unit, head)
                await _check_transfers(unit, head, transfers_seen)
            new = changed(head, closing, status=status, policy=policy)
            if closing is not None and status is not None:  # the freeze is not the close's any more, to be lifted by it
                await unit.closings.drop(path)
            if new is None:
                return head
            if policy is not None:
                await _check_policy(unit, policy, head.book)
                await _change_guards(unit, head, new)
            return await _append(unit, new)

    async def _check_settled(self, unit: Tables) -> None:
        """No commit is half done. None ever is, where a commit is one transaction; the simulator's split mode looks."""

    async def begin_close(self, path: str, token: str) -> Account:
        """Freeze a user's funding account for the close of this token, and write down whose freeze it is.

        It stays that close's until a person freezes or unfreezes the account, or another close begins. The freeze of a
        person is left as it is.
        """
        if funding_user(check_path(path)) is None:
            raise InvalidName("account to freeze while it closes", path, "a user's funding account")
        async with self.store.transaction() as unit:
            head, closing = await _locked(unit, path)
            if not close_may_freeze(head, closing):
                return head
            await unit.closings.put(path, token)
            new = changed(head, None, status=AccountStatus.FROZEN)
            return head if new is None else await _append(unit, new)

    async def cancel_close(self, path: str, token: str) -> None:
        """Lift the freeze that the close of this token has made, if it is still its own; else change nothing."""
        async with self.store.transaction() as unit:
            await unit.rules.bump()  # first: this waits for a COMMIT of the close whose reply was lost
            head = (await unit.accounts.heads([path])).get(path)
            new = lifted(head, await unit.closings.of(path), token)
            if new is not None:
                await unit.closings.drop(path)
                await _append(unit, new)

    async def close_empty(self, path: str, *, transfers_seen: int | None = None) -> Account:
        """Close an account whose balances are all zero. `transfers_seen`: how many transfers its user had made when the
        trading cores were asked; without it, the account of a user who may have money at one is not closed."""
        return await self._change(path, status=AccountStatus.CLOSED, transfers_seen=transfers_seen)

    async def widen(self, account: Account, *, soon: bool = False) -> None:
        """Give an account with many postings a balance cache, starting from its sum. `soon`: or not at all."""
        async with self.store.transaction() as unit:
            await unit.rules.bump(soon=soon)
            await _start_cache(unit, account.id)


def find_asset(assets: Mapping[str, Asset], code: str) -> Asset:
    """The asset of a code, or a refusal."""
    found = assets.get(code) if isinstance(code, str) else None
    if found is None:
        raise UnknownAsset(str(code))
    return found


def check_truth(what: str, value: bool | None) -> bool | None:
    """The same truth, or None; or a refusal."""
    if value is not None and type(value) is not bool:
        raise InvalidName(what, str(value), "True or False")
    return value


def _check_asked(found: Asset, asked: dict[str, int]) -> None:
    """An asset that is there must be what was asked for: to ignore the difference is to do something else."""
    for what, value in asked.items():
        there = getattr(found, what)
        if there == value:
            continue
        if what == "precision":
            raise AlreadyExists("asset", found.code, f"it has {there} decimals, and that never changes")
        shown, wanted = (str(v) if isinstance(v, bool) else str(found.of_minor(v)) for v in (there, value))
        why = f"its {what} is {shown}, not {wanted}; change it with `bursar asset change {found.code}`"
        raise AlreadyExists("asset", found.code, why)


def _limits(asset: Asset, low: Amount | None, high: Amount | None) -> Asset:
    least = asset.min_transfer if low is None else asset.minor(low)
    most = asset.max_transfer if high is None else asset.minor(high)
    if not 0 < least <= most:
        raise InvalidName("transfer limit", f"{low} to {high}", "0 < lower limit <= upper limit")
    return msgspec.structs.replace(asset, min_transfer=least, max_transfer=most)


async def _locked(unit: Tables, path: str) -> tuple[Account, Closing | None]:
    """An account that is to be changed, and the close that has frozen it. No other transaction changes either
    before this one ends, and no commit is between its check and its write."""
    await unit.rules.bump()  # first: what is read before this may be old
    head = (await unit.accounts.heads([path])).get(path)
    if head is None:
        raise UnknownAccount(path)
    if head.status is AccountStatus.CLOSED:
        raise AccountClosed(path)
    is_funding = funding_user(path) is not None  # no other account is frozen by its close
    return head, await unit.closings.of(path) if is_funding else None


async def _append(unit: Tables, new: Account) -> Account:
    """Write a new version of an account, and announce it."""
    if not await unit.accounts.append(new):
        raise Conflict(f"account {new.path} was changed by another transaction", 1)
    await unit.events.append(EventKind.ACCOUNT_CHANGED, new.id, new.version)
    return new


async def _check_policy(unit: Tables, policy: Policy, book: str) -> None:
    check_policy(policy)
    if isinstance(policy, CappedOverdraft):
        asset = find_asset(await unit.rules.assets(), policy.asset)
        floor_minor(policy.floor, asset.code, asset.precision)
    if book and book not in await unit.rules.books():
        raise UnknownBook(book)


async def _check_empty(unit: Tables, head: Account) -> None:
    """No value and no holds. The rules' row is ours, so nothing can arrive in between."""
    if any(amount for amount, _ in (await unit.balances.of(head.id)).values()):
        raise AccountNotEmpty(head.path, "it still has a balance")
    if await unit.holds.open_of(head.id):
        raise AccountNotEmpty(head.path, "it still has open holds")
    if await unit.accounts.in_transit(head.id):
        raise AccountNotEmpty(
            head.path, "money of it is in transit and may have to come back; wait until it has arrived"
        )


async def _check_transfers(unit: Tables, head: Account, seen: int | None) -> None:
    """No end of a transfer that is under way, and no money at a core (T44). The rules' row is ours, and whatever starts
    a transfer shares it: none can start in between."""
    user = funding_user(head.path)
    if user is None:
        return
    if under_way := await unit.records.open_of(TRANSFERS, str(user)):
        why = f"{under_way} transfers of its user are under way; wait until they have ended"
        raise AccountNotEmpty(head.path, why)
    if seen is None and await unit.accounts.holding(CORES):
        why = "its user may have money at a trading core: use `bursar account close` or `Transfers.close_account`"
        raise AccountNotEmpty(head.path, f"{why}, which ask the cores")
    if seen is not None and await unit.records.count(TRANSFERS, str(user)) != seen:
        raise AccountNotEmpty(head.path, "a transfer of its user was made meanwhile; try again")


async def _change_guards(unit: Tables, head: Account, new: Account) -> None:
    """What guards the new policy must be true from its first moment."""
    sums = await unit.balances.of(head.id)
    assets = {a.id: a for a in (await unit.rules.assets()).values()}
    for number in sums:
        if not new.may_owe(assets[number]) and await unit.postings.candidates("most_negative", head.id, number, 1):
            raise AccountNotEmpty(head.path, f"it has negative postings of {assets[number].code}; pay them off first")
    if isinstance(head.policy, CappedOverdraft):
        await unit.balances.drop_guarded(head.id)
    if isinstance(new.policy, CappedOverdraft):
        asset = next(a for a in assets.values() if a.code == new.policy.asset)
        await unit.balances.put_guarded([(head.id, asset.id, sums.get(asset.id, (0, 0))[0])])
    if head.pays_from_postings != new.pays_from_postings:
        await _start_cache(unit, head.id)


async def _start_cache(unit: Tables, account: int) -> None:
    sums = await unit.balances.of(account)
    await unit.balances.start_cache(account, {asset: amount for asset, (amount, _) in sums.items()})
