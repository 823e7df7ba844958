"""Shared and exclusive locks on a tree of resources, and the lock templates of tools.

All locks of a call are taken at once, first come first served, without deadlock. A *want* is a resource and a mode. A
resource is its path from its root, ``("workspace", "src", "a.py")``; a lock on it covers everything below. Roots are
independent. Callers ask for S (shared) or X (exclusive). On the ancestors the table itself takes the intention modes IS or
IX, so that ``workspace:X`` meets every file's lock without looking at them. S on a folder together with X on something in
it is SIX, as in Gray's lock hierarchy.

**No deadlock.** A request takes its place at all its resources in one synchronous step, so any two
requests have the same order wherever they meet. A request waits only for *earlier* ones that it conflicts
with. The earliest waiting request therefore waits only for holders, and a holder never waits: a call made under a
grant runs under that grant or is refused (:meth:`LockGrant.covers`). A tool that holds no locks, and runs under none, may
wait: the calls that it makes ask for their own locks.

**No starvation.** A later request never passes an earlier one that it conflicts with. A request without an earlier
conflict passes at once.

**Cost.** Each resource has one packed counter for each mode, over the requests whose turn has come there. Only while
requests wait there, it also has one FIFO per mode. The head of a FIFO enters as soon as it conflicts with no counter and no
earlier FIFO, together with all compatible requests behind it. A request that has its turn at every resource (it misses
none) is granted. The table visits a request once per resource when it arrives, once when its turn comes and once when it
leaves, however many others wait. It visits queues only when the last holder of a mode leaves.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

from handrail.arbiter.stoppable_execution import start_shared_timeout
from handrail.contract.errors import HandrailError, ToolError, UsageError
from handrail.contract.services.file_services import ResolvedPath
from handrail.contract.text.patch_text import extract_patch_paths
from handrail.contract.text.strict_json import get_json_type_name
from handrail.contract.tool.spec import (
    LockMode,
    LockSpec,
    ToolSpec,
    extract_template_argument_names,
    fill_template,
    find_patch_arguments,
)
from handrail.origins.listed_paths import make_spelling_independent_key, resolve_name_folding_path
from handrail.runtime.files.session_roots import SessionRoots

# pyright: reportPrivateUsage=false
# The table, its requests and its grants are one mechanism; no other code sees their inner fields.


LockResource = tuple[str, ...]
RequiredLock = tuple[LockResource, LockMode]
_Plan = Sequence[tuple[LockResource, int]]

_NAMES = ("IS", "IX", "S", "SIX", "X")
_IS, _IX, _S, _SIX, _X = range(5)
_MODE: dict[str, int] = {"S": _S, "X": _X}
_AGAINST: tuple[tuple[int, ...], ...] = (
    (_X,),
    (_S, _SIX, _X),
    (_IX, _SIX, _X),
    (_IX, _S, _SIX, _X),
    (_IS, _IX, _S, _SIX, _X),
)
"""The conflicting modes of each mode. The relation is symmetric."""

# The counters of a resource are fields of one integer, so the test for a conflict is one AND.
_WIDTH = 32
_ONE = tuple(1 << _WIDTH * mode for mode in range(5))
_FIELD = tuple(((1 << _WIDTH) - 1) << _WIDTH * mode for mode in range(5))
_CONFLICTS = tuple(sum(_FIELD[other] for other in against) for against in _AGAINST)


class LockTimeout(HandrailError):
    """A wait for locks exceeded its budget, and the request has left every queue. The text names the holders."""


class LockGrant:
    """The locks of one call, from ``try_acquire`` or ``wait_until_granted`` until their release."""

    __slots__ = ("_plan", "owner")

    def __init__(self, plan: _Plan, owner: str) -> None:
        self._plan = plan
        self.owner = owner

    def covers(self, wants: Iterable[RequiredLock]) -> bool:
        """Return whether a nested call with these ``wants`` may run under this grant.

        X covers S and X, S covers S, on the resource and everything below it.
        """
        held = dict(self._plan)
        for resource, mode in wants:
            enough = (_X,) if mode == "X" else (_S, _SIX, _X)
            # A lock on a folder covers everything below it, so each ancestor is tested.
            if not any(held.get(resource[:depth]) in enough for depth in range(1, len(resource) + 1)):
                return False
        return True

    def __repr__(self) -> str:
        return f"<Grant {self.owner} {_describe_plan(self._plan)}>"


class QueuedLockRequest:
    """A place in the queues. Await :meth:`wait_until_granted`, or call :meth:`withdraw_from_queue`."""

    __slots__ = ("_arrival", "_grant", "_late", "_missing", "_plan", "_state", "_table", "_wake", "owner")

    def __init__(self, table: LockTable, plan: _Plan, owner: str, arrival: int) -> None:
        self._table = table
        self._plan = plan
        self._arrival = arrival
        self._missing = 0
        self._grant: LockGrant | None = None
        self._wake: asyncio.Future[None] | None = None
        self._late: str | None = None
        """What it waited for when its time was over."""
        self._state: Literal["queued", "granted", "taken", "withdrawn"] = "queued"
        self.owner = owner

    @property
    def is_grant_ready(self) -> bool:
        """Whether its turn has come, so that :meth:`wait_until_granted` returns at once."""
        return self._state == "granted"

    async def wait_until_granted(self, timeout_s: float | None = None) -> LockGrant:
        """Wait until all requested locks are held.

        If the waiting task is cancelled, the request leaves every queue, even if its turn came at the same time.

        :param timeout_s: the budget of this wait in seconds; None for no limit
        :raises LockTimeout: if the budget is used up first
        :raises UsageError: if it was awaited before, or withdrawn
        """
        if self._state in ("taken", "withdrawn") or self._wake is not None:
            raise UsageError(f"The lock request {self!r} was already awaited or withdrawn. Await a request once.")
        if timeout_s is not None and not timeout_s >= 0:
            raise UsageError(f"The budget of a lock wait is invalid: {timeout_s!r} s. Expected 0 or more, or None.")
        if self._grant is None:
            await self._wait_turn(timeout_s)
        if self._grant is None:
            raise UsageError(
                f"The lock request {self!r} was withdrawn while it was awaited. Acquire the lock with a new request."
            )
        self._state = "taken"
        return self._grant

    async def _wait_turn(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        timeout = None if timeout_s is None else start_shared_timeout(loop, self, timeout_s)
        try:
            await self._wake
        except BaseException:
            self.withdraw_from_queue()
            raise
        finally:
            if timeout is not None:
                timeout.stop(self)
        if self._late is not None:
            raise LockTimeout(self._late)

    def time_out(self) -> None:
        """Leave the queues, since the budget of the wait is used up."""
        # The grant may have come in the same turn of the loop. Then it counts, and not the time-out.
        if self._state == "queued" and self._wake is not None and not self._wake.done():
            self._late = self._table.describe_lock_wait(self)
            self.withdraw_from_queue()

    def withdraw_from_queue(self) -> None:
        """Give up a queued place, or a grant that :meth:`wait_until_granted` has not returned yet.

        Later calls have no effect, so it may be called in a ``finally``.
        """
        if self._state in ("taken", "withdrawn"):
            return
        self._state = "withdrawn"
        grant, self._grant = self._grant, None
        # The turn came, but the caller no longer waits. The grant must not stay held.
        if grant is not None:
            self._table.release_grant(grant)
        else:
            self._table._leave_queues(self, self._plan)
        self._wake_up()

    def _accept_grant(self, grant: LockGrant) -> None:
        self._grant = grant
        self._state = "granted"
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def __repr__(self) -> str:
        return f"<Request {self.owner} {_describe_plan(self._plan)} {self._state}>"


_Fifos = tuple["OrderedDict[QueuedLockRequest, None]", ...]


def format_locks(wants: tuple[RequiredLock, ...]) -> tuple[str, ...]:
    """Return locks in readable form, such as ``workspace/src/a.py:X``."""
    return tuple(f"{'/'.join(resource)}:{mode}" for resource, mode in wants)


class LockTable:
    """The holders and waiters of all locks. Use it only on the thread of its event loop."""

    __slots__ = ("_arrivals", "_grants", "_queues", "_taken")

    def __init__(self) -> None:
        self._taken: dict[LockResource, int] = {}
        """Packed counters by resource of the requests whose turn has come there: granted, or waiting elsewhere."""
        self._queues: dict[LockResource, _Fifos] = {}
        """One FIFO per mode and resource of the requests whose turn has not come; only for resources with waiters."""
        self._grants: set[LockGrant] = set()
        self._arrivals = 0

    def try_acquire(self, wants: Sequence[RequiredLock], owner: str = "") -> LockGrant | None:
        """Acquire all of ``wants`` at once, or return None if one conflicts. Never waits.

        :param owner: the holder, as other calls see it while they wait
        :raises UsageError: for an invalid want
        """
        plan = _plan_locks(wants)
        taken = self._taken
        for resource, mode in plan:
            if resource in taken and taken[resource] & _CONFLICTS[mode]:
                return None
        if self._queues and not all(self._has_no_conflict(resource, mode) for resource, mode in plan):
            return None
        for resource, mode in plan:
            taken[resource] = taken.get(resource, 0) + _ONE[mode]
        grant = LockGrant(plan, owner)
        self._grants.add(grant)
        return grant

    def queue_for_locks(self, wants: Sequence[RequiredLock], owner: str = "") -> QueuedLockRequest:
        """Queue for ``wants`` at every resource, in the order of the calls of this method.

        :raises UsageError: for an invalid want
        """
        plan = _plan_locks(wants)
        self._arrivals += 1
        request = QueuedLockRequest(self, plan, owner, self._arrivals)
        taken = self._taken
        for resource, mode in plan:
            # The request takes its place here at once, even if it still waits elsewhere. So no later request can
            # overtake it.
            if self._has_no_conflict(resource, mode):
                taken[resource] = taken.get(resource, 0) + _ONE[mode]
                continue
            if (fifos := self._queues.get(resource)) is None:
                fifos = self._queues[resource] = tuple(OrderedDict[QueuedLockRequest, None]() for _ in range(5))
            fifos[mode][request] = None
            request._missing += 1
        if not request._missing:
            self._grant_request(request)
        return request

    def release_grant(self, grant: LockGrant) -> None:
        """Release everything that ``grant`` holds, and admit the waiters whose turn comes.

        :raises UsageError: if it was released before or belongs to another table; nothing changes then
        """
        try:
            self._grants.remove(grant)
        except KeyError:
            raise UsageError(f"{grant!r} is not held. Release a grant once, to the table that granted it.") from None
        self._release_plan(grant._plan)

    def describe_lock_wait(self, request: QueuedLockRequest) -> str:
        """Return in one line what ``request`` waits for and who holds it, for events and ``explain``."""
        parts: list[str] = []
        for resource, mode in request._plan:
            if request not in self._queues.get(resource, _NO_FIFOS)[mode]:
                continue
            holders = [
                f"{grant.owner or 'another call'} ({_NAMES[held]})"
                for grant in self._grants
                for where, held in grant._plan
                if where == resource and held in _AGAINST[mode]
            ]
            shown = ", ".join(sorted(holders)[:3]) + (f" and {len(holders) - 3} more" if len(holders) > 3 else "")
            parts.append(
                f"{'/'.join(resource)}:{_NAMES[mode]} "
                + (f"held by {shown}" if holders else "behind earlier waiting calls")
            )
        more = f"; and {len(parts) - 3} more resources" if len(parts) > 3 else ""
        return "; ".join(parts[:3]) + more

    @property
    def active_resource_count(self) -> int:
        """The number of resources with a holder or a waiter."""
        return len(self._taken.keys() | self._queues.keys())

    def _has_no_conflict(self, resource: LockResource, mode: int) -> bool:
        """Return whether a new request would conflict with no holder and no waiter."""
        if self._taken.get(resource, 0) & _CONFLICTS[mode]:
            return False
        fifos = self._queues.get(resource)
        return fifos is None or not any(fifos[other] for other in _AGAINST[mode])

    def _grant_request(self, request: QueuedLockRequest) -> None:
        grant = LockGrant(request._plan, request.owner)
        self._grants.add(grant)
        request._accept_grant(grant)

    def _leave_queues(self, request: QueuedLockRequest, plan: _Plan) -> None:
        for resource, mode in plan:
            fifos = self._queues.get(resource)
            # Its turn has not come here, so it holds nothing at this resource.
            if fifos is not None and request in fifos[mode]:
                del fifos[mode][request]
                self._admit_waiters(resource, mode, fifos)
            else:
                self._release_plan(((resource, mode),))

    def _release_plan(self, plan: _Plan) -> None:
        for resource, mode in plan:
            if left := self._taken[resource] - _ONE[mode]:
                self._taken[resource] = left
            else:
                del self._taken[resource]
            # Only the last of a mode to leave can make room. Without this, each file's release would look at the
            # queues of every folder above it.
            if self._queues and not left & _FIELD[mode]:
                fifos = self._queues.get(resource)
                if fifos is not None:
                    self._admit_waiters(resource, mode, fifos)

    def _admit_waiters(self, resource: LockResource, gone: int, fifos: _Fifos) -> None:
        """Admit the waiters at ``resource`` that the last request of mode ``gone`` kept out."""
        taken = self._taken
        # Only modes that conflict with the released one can have waited for it.
        for mode in _AGAINST[gone]:
            fifo = fifos[mode]
            while fifo:
                request = next(iter(fifo))
                if taken.get(resource, 0) & _CONFLICTS[mode] or any(
                    fifos[other] and next(iter(fifos[other]))._arrival < request._arrival for other in _AGAINST[mode]
                ):
                    break
                del fifo[request]
                taken[resource] = taken.get(resource, 0) + _ONE[mode]
                request._missing -= 1
                if not request._missing:
                    self._grant_request(request)
        # Without waiters the entry goes, so that the fast path of an acquisition stays one lookup.
        if not any(fifos):
            del self._queues[resource]


def do_locks_conflict(some: Iterable[RequiredLock], others: Iterable[RequiredLock]) -> bool:
    """Return whether two calls with these wants cannot run at the same time."""
    planned = dict(_plan_locks(tuple(some)))
    return any(
        resource in planned and planned[resource] in _AGAINST[mode] for resource, mode in _plan_locks(tuple(others))
    )


_NO_FIFOS: _Fifos = tuple(OrderedDict[QueuedLockRequest, None]() for _ in range(5))


def _plan_locks(wants: Sequence[RequiredLock]) -> _Plan:
    """Return each resource and ancestor once, in the one mode that covers all wants."""
    try:
        asked = tuple(wants)
        return _remembered(asked) if len(asked) <= _FEW else _make_plan(asked)
    except (KeyError, ValueError, TypeError):
        raise UsageError(
            f"Invalid locks: {wants!r}. Expected pairs of a resource and a mode ('S' or 'X'), such as (('workspace', 'a.py'), 'X')."
        ) from None


def _make_plan(wants: tuple[RequiredLock, ...]) -> _Plan:
    merged: dict[LockResource, int] = {}
    for resource, asked in wants:
        mode, length = _MODE[asked], len(resource)
        # An empty resource would be the ancestor of everything.
        if not length:
            raise ValueError
        intention = _IX if mode == _X else _IS
        for depth in range(1, length):
            above = resource[:depth]
            # Two wants can share an ancestor. It gets one mode that is as strong as both.
            merged[above] = _JOIN[merged.get(above, intention)][intention]
        merged[resource] = _JOIN[merged.get(resource, mode)][mode]
    return tuple(merged.items())


_FEW = 4
_remembered = lru_cache(maxsize=1024)(_make_plan)
"""Tools ask for the same few locks again and again."""


def _weakest_covering_mode(one: int, other: int) -> int:
    """Return the weakest mode that is at least as strong as both."""
    if {one, other} == {_IX, _S}:
        return _SIX
    return max(one, other)


_JOIN = tuple(tuple(_weakest_covering_mode(one, other) for other in range(5)) for one in range(5))


def _describe_plan(plan: _Plan) -> str:
    return ", ".join(f"{'/'.join(resource)}:{_NAMES[mode]}" for resource, mode in plan)


# Lock templates of tools, filled from a call's arguments, as canonical resources.
#
# - ``workspace`` is the root of every ``file:`` resource in the workspace, and in the agent's further writable roots: a call
#   that locks the whole workspace (``bash``) may write there too;
# - ``file:<path>`` elsewhere (a session's output, a read-only root) has a separate root;
# - every other template is one independent resource: ``memory``, ``account:alice``.
#
# Two spellings of one file are one resource, since paths are located first.

WORKSPACE = "workspace"
OUTSIDE_ROOTS = "file:/"
"""The root of files outside the workspace. No template can name it, so no other root conflicts with it."""

MAX_LOCKS = 10_000
"""How many resources one template may expand to in one call."""

MAX_BITS = 4096
"""The longest integer that can name a resource. Python refuses to print much longer ones."""

_FILE = "file:"


class LockResolver:
    """A resolver of the lock templates of tools. A kernel has one, which caches compiled templates."""

    __slots__ = ("_compiled",)

    def __init__(self) -> None:
        # By identity, which is faster than hashing a whole spec. The entry is removed with the spec, before its id is reused.
        self._compiled: dict[int, tuple[weakref.ref[ToolSpec], CompiledLockTemplates]] = {}

    def resolve(
        self,
        spec: ToolSpec,
        arguments: Mapping[str, Any],
        roots: SessionRoots,
        located: dict[str, ResolvedPath] | None = None,
        *,
        background: bool = False,
    ) -> tuple[RequiredLock, ...]:
        """Return the locks that a call of ``spec`` with validated ``arguments`` requires.

        :param located: receives the resolved paths by their texts, for the rules that evaluate the call in the same loop turn
        :param background: return the locks of a background call
        :raises ToolError: ``invalid_input`` if an argument cannot name a resource
        """
        located = {} if located is None else located
        if background:
            templates = CompiledLockTemplates(spec.background_locks, find_patch_arguments(spec.parameters))
            return templates.resolve(arguments, roots, located)
        key = id(spec)
        if (found := self._compiled.get(key)) is None:
            gone = weakref.ref(spec, lambda _, compiled=self._compiled: compiled.pop(key, None))
            made = CompiledLockTemplates(spec.effective_locks, find_patch_arguments(spec.parameters))
            found = self._compiled[key] = (gone, made)
        templates = found[1]
        return templates.resolve(arguments, roots, located) if templates.filled else templates.constant


def make_file_locks_shared(wants: tuple[RequiredLock, ...]) -> tuple[RequiredLock, ...]:
    """Return the locks of a call that runs read-only: shared instead of exclusive for files."""
    return tuple((resource, "S" if resource[0] in (WORKSPACE, OUTSIDE_ROOTS) else mode) for resource, mode in wants)


class _LockTemplate:
    """A template with placeholders, or the name of a file. Most have one placeholder, which takes a text."""

    __slots__ = ("_whole", "after", "before", "lock", "name")

    def __init__(self, lock: LockSpec) -> None:
        self.lock = lock
        names = lock.required_argument_names
        self._whole = () if names else (fill_template(lock.resource, {}),)
        self.name = names[0] if len(names) == 1 else ""
        """Its only placeholder, which is filled in between ``before`` and ``after``."""
        self.before, _, self.after = fill_template(lock.resource, {self.name: "\0"}).partition("\0")

    def expand_resources(self, arguments: Mapping[str, Any]) -> Iterable[str]:
        """Return the resources that it expands to.

        :raises ToolError: ``invalid_input`` if an argument cannot name a resource
        """
        if self._whole:
            return self._whole
        return [fill_template(self.lock.resource, values) for values in _fill_values(self.lock, arguments)]


class CompiledLockTemplates:
    """The compiled lock templates of one tool.

    :param patches: the arguments that are patches, which stand for the paths that they name
    """

    __slots__ = ("_patches", "constant", "filled")

    def __init__(self, locks: tuple[LockSpec, ...], patches: frozenset[str] = frozenset()) -> None:
        self._patches = patches
        constant: list[RequiredLock] = []
        self.filled: list[_LockTemplate] = []
        for lock in locks:
            # The name of a file is resolved again for each call, since links change.
            if lock.resource.startswith(_FILE) or extract_template_argument_names(lock.resource):
                self.filled.append(_LockTemplate(lock))
            else:
                constant.append(((lock.resource,), lock.mode))
        self.constant = tuple(constant)

    def resolve(
        self, arguments: Mapping[str, Any], roots: SessionRoots, located: dict[str, ResolvedPath]
    ) -> tuple[RequiredLock, ...]:
        """Return the locks for these arguments; see :meth:`LockResolver.resolve`."""
        wants = dict.fromkeys(self.constant)
        for template in self.filled:
            mode = template.lock.mode
            value = arguments.get(template.name) if template.name else None
            filled: Iterable[str]
            if type(value) is not str:
                filled = template.expand_resources(arguments)
            elif template.name in self._patches:
                filled = (template.before + path + template.after for path in extract_patch_paths(value).named)
            else:
                filled = (template.before + value + template.after,)
            for resource in filled:
                if not resource.startswith(_FILE):
                    wants[(resource,), mode] = None
                elif path := resource[len(_FILE) :]:
                    if (where := located.get(path)) is None:
                        where = located[path] = roots.resolve_path(path)
                    for one in _file_resources(where.absolute, roots):
                        wants[one, mode] = None
                else:  # an optional argument that was left out is the whole workspace
                    wants[(WORKSPACE,), mode] = None
        return tuple(wants)


def _file_resources(absolute: str, roots: SessionRoots) -> tuple[LockResource, ...]:
    """Return the resources of one file, by its canonical path.

    All spellings of a file have the same resources, also of one that does not exist yet.
    """
    workspace, writable = roots.workspace, roots.writable
    # On a file system that ignores letter case, two names of one file must be one lock.
    if (spelling := resolve_name_folding_path(absolute, is_listed=True)) is not None:
        absolute, workspace = spelling.key, make_spelling_independent_key(workspace)
        writable = frozenset(map(make_spelling_independent_key, writable))
    inside = workspace if workspace == "/" else workspace + "/"
    if absolute.startswith(inside) and absolute != inside:
        return ((WORKSPACE, *absolute[len(inside) :].split("/")),)
    if absolute == workspace:
        return ((WORKSPACE,),)
    if any(absolute == root or absolute.startswith(root + "/") for root in writable):
        return ((WORKSPACE, "/", *absolute[1:].split("/")),)  # no name in the workspace is "/"
    elsewhere = (OUTSIDE_ROOTS,) if absolute == "/" else (OUTSIDE_ROOTS, *absolute[1:].split("/"))
    folder = absolute.rstrip("/") + "/"
    if any(root.startswith(folder) for root in writable):  # a folder that holds such a root covers it too
        return (elsewhere, (WORKSPACE,))
    return (elsewhere,)


def _fill_values(lock: LockSpec, arguments: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the texts to fill in: one set per item of a list, an empty text for an omitted argument."""
    spread: list[dict[str, str]] = [{}]
    for name in dict.fromkeys(lock.required_argument_names):
        value = arguments.get(name)
        items: list[object] = [value]
        if isinstance(value, (list, tuple)):
            items = list(cast("list[object]", value)) or [None]
        texts = dict.fromkeys(_spell_value(lock, name, item) for item in items)
        # Several list arguments multiply, so the limit is tested before the product is built.
        if len(spread) * len(texts) > MAX_LOCKS:
            raise ToolError(
                f"The arguments name too many resources for the lock `{lock}`. The limit is {MAX_LOCKS:,}. Pass fewer at a time.",
                kind="invalid_input",
            )
        spread = [{**filled, name: text} for filled in spread for text in texts]
    return spread


def _spell_value(lock: LockSpec, name: str, value: object) -> str:
    """Return one spelling per value: 5 and 5.0 are the same JSON number."""
    if value is None:
        return ""
    # A bool is an int in Python, and would be spelled as 1 or 0.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (str, float)) or (isinstance(value, int) and value.bit_length() <= MAX_BITS):
        return str(value)
    raise ToolError(
        f"Argument `{name}` is a JSON {get_json_type_name(value)}. The lock `{lock}` needs a string, a number or a list of these.",
        kind="invalid_input",
    )
