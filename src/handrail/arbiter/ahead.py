"""What a call asks for, worked out while its block is still open in the model's stream.

A block is closed a moment after the last piece of its arguments has come, and from then on every step is one that somebody
waits for. Reading the arguments, checking them, finding the locks and judging by the rules change nothing and tell nobody, so
they are done in that moment. The call takes its steps as always, in their order; it only finds these answers there, and the
disk awake where it will have to be noted first.
"""

from __future__ import annotations

from handrail.arbiter.authorisation import Authorisation
from handrail.arbiter.calls.arguments import arguments_of
from handrail.arbiter.calls.call import Call, LookedAhead
from handrail.arbiter.locks.resources import Resources


def look_ahead(call: Call, resources: Resources, authorisation: Authorisation) -> LookedAhead | None:
    """What :attr:`Call.looked` of a call like this one will be, if its block closes as it stands. None where that takes more
    than a look at it, and where it is not sound or cannot be looked at: whatever is to be said of it then is said when it is
    proposed.

    :param call: of no use afterwards
    """
    try:
        looked = _looked_at(call, resources, authorisation)
    except Exception:  # a fault of its arguments, or a defect of ours, which is nobody else's
        return None
    entry = call.entry
    if looked is not None and looked.verdict.action == "allow" and entry and entry.spec.side_effect != "read":
        call.log.rouse()
    return looked


def _looked_at(call: Call, resources: Resources, authorisation: Authorisation) -> LookedAhead | None:
    entry, proposed = call.generation.resolve(call.proposed.name), call.proposed
    if entry is None or entry.withheld is not None:
        return None
    if not isinstance(proposed.arguments, (str, bytes)):  # whoever made an object may still change it
        return None
    spec, tool = entry.spec, entry.tool
    if spec.mode != "direct" or spec.background_argument is not None or tool.types:
        return None
    if tool.asks_source is not None or tool.goes_on is not None:
        return None
    given, compact, _ = arguments_of(proposed)
    if given is None:
        return None
    lane, call.entry, call.arguments = call.lane, entry, entry.admitted(given, parsed=True)
    wants, verdict = resources.wants(spec, call.arguments, lane.around.roots), authorisation.judged(call)
    return LookedAhead(proposed, given, compact, call.arguments, wants, lane.authority.layer, lane.rules, verdict)
