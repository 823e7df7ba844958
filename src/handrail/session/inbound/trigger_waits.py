"""Tasks that wait for triggers of registered classes. A trigger that keeps failing is stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from handrail.contract.errors import LogUnavailable, ToolError
from handrail.contract.services.channels_and_triggers import CustomTriggerTool, Trigger
from handrail.contract.struct import Struct
from handrail.contract.text.neutralisation import neutralise_text
from handrail.contract.tool.trigger_tools import TriggerContext, TriggerEvent
from handrail.store.json_fallback_encoding import encode_json_with_fallback

logger = logging.getLogger("handrail.session")

TriggerId = tuple[str, str]
"""A session id and a trigger's name."""
MAX_FAULTS = 5
"""The number of faults in a row after which a trigger is stopped."""
MAX_POSITION = 64 * 1024
MIN_PAUSE_S = 1.0
"""The pause between two firings of one trigger, and after its first fault. Each further fault doubles it, up to a minute."""
MAX_PAUSE_S = 60.0
_GRACE_S = 1.0
_SECOND_NS = 1_000_000_000


class WaitResult(Struct, frozen=True):
    """The result of a wait: a firing, or too many failures of its class."""

    text: str = ""
    position: Any = None
    last: bool = False
    fault: str | None = None


class TriggerStore(Protocol):
    """A store of triggers."""

    def get(self, id: TriggerId) -> Trigger | None: ...

    async def record_wait_result(self, id: TriggerId, what: WaitResult) -> bool:
        """Record a result durably, and return whether the session was notified.

        :raises LogUnavailable: if it cannot be stored
        """
        ...


class TriggerWaiters:
    """The tasks that wait for triggers of classes with a ``wait`` method."""

    def __init__(self, store: TriggerStore) -> None:
        self._store = store
        self._tasks: dict[TriggerId, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    def start(self, id: TriggerId, of: CustomTriggerTool, workdir: str) -> None:
        if id not in self._tasks or self._tasks[id].done():
            self._tasks[id] = asyncio.get_running_loop().create_task(
                self._wait_repeatedly(id, of, workdir), name=f"trigger {id}"
            )

    def stop(self, id: TriggerId) -> None:
        """Stop waiting for a trigger. A wait that ignores its cancellation is left running."""
        task = self._tasks.pop(id, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def aclose(self) -> None:
        for id in list(self._tasks):
            self.stop(id)
        if self._stopping:
            _, left = await asyncio.wait(set(self._stopping), timeout=_GRACE_S)
            for task in left:
                logger.warning("%s ignores its cancellation", task.get_name())

    async def _wait_repeatedly(self, id: TriggerId, of: CustomTriggerTool, workdir: str) -> None:
        faults = 0
        while (trigger := self._store.get(id)) is not None:
            try:
                fired = _check_event(await of.wait(_make_context(trigger, workdir)))
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                error: BaseException = RuntimeError("wait() ended by a cancellation from inside")
            except (Exception, SystemExit) as raised:  # a class's sys.exit() would end the process
                error = raised
            else:
                faults = 0
                await self._deliver(id, WaitResult(fired.text, fired.position, fired.is_last))
                await asyncio.sleep(MIN_PAUSE_S)
                continue
            faults += 1
            logger.warning("trigger %s of %s failed (%d of %d): %r", id[1], of.spec.id, faults, MAX_FAULTS, error)
            if faults >= MAX_FAULTS:
                await self._deliver(id, WaitResult(fault=neutralise_text(f"{type(error).__name__}: {error}"[:500])))
                return
            await asyncio.sleep(min(MIN_PAUSE_S * 2 ** (faults - 1), MAX_PAUSE_S))

    async def _deliver(self, id: TriggerId, what: WaitResult) -> None:
        """Deliver a result. Retry while the session has too many notifications or the result cannot be stored."""
        pause = MIN_PAUSE_S
        while True:
            try:
                if await self._store.record_wait_result(id, what):
                    return
            except LogUnavailable as error:
                logger.warning("trigger %s is delayed because its notification cannot be stored: %s", id[1], error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, MAX_PAUSE_S)


def compute_next_class_firing_ns(of: CustomTriggerTool, arguments: Mapping[str, Any], now_ns: int) -> int | None:
    """Return when a trigger of a class fires next, at least a second from now, or None for never.

    :raises ToolError: ``failed`` if the class fails or returns an invalid time
    """
    try:
        found: Any = of.next_ns(arguments, now_ns)
    except ToolError:
        raise
    except (Exception, SystemExit) as error:
        raise ToolError(
            f"Tool {of.spec.id} failed to compute the next time: {type(error).__name__}: {error}"[:500]
        ) from error
    if found is None:
        return None
    if not isinstance(found, int) or not 0 <= found < 2**63:
        raise ToolError(
            f"Tool {of.spec.id} returned an invalid time: {found!r:.80}. Expected nanoseconds since 1970, or None. Ask the user to fix the tool."
        )
    return max(found, now_ns + _SECOND_NS)


def _make_context(trigger: Trigger, workdir: str) -> TriggerContext:
    arguments = dict(trigger.arguments or {})
    position, since = trigger.position, trigger.created_ns
    return TriggerContext(trigger.name, trigger.session_id, workdir, arguments, position, trigger.fire_count, since)


def _check_event(given: Any) -> TriggerEvent:
    text: Any = given.text if isinstance(given, TriggerEvent) else None
    if not isinstance(given, TriggerEvent) or not isinstance(text, str):
        raise TypeError(f"wait() returned {type(given).__name__}. Expected a Fired with a text.")
    if (size := len(encode_json_with_fallback(given.position, max_bytes=2**62))) > MAX_POSITION:
        raise ValueError(f"wait() returned a position of {size:,} bytes. The maximum is {MAX_POSITION:,}.")
    return given
