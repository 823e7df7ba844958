"""After a program has run: files that it made under protected names, and what is done with them.

Compared by names and, for what may be changed by keys, by content, with what there was when it started. A repository
that was newly made goes as a whole: one without its configuration and hooks is no less than half of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.protected import GIT, Protection, plain
from handrail.contract.sandbox import Denials, Profile
from handrail.runtime import vcs
from handrail.runtime.quarantine import Quarantine, make_readable, open_parent
from handrail.runtime.roots import visible
from handrail.sandbox import protected
from handrail.sandbox.tree import Protected, Tree

_OPENED_IN_ONE_LOOK = 64
_MOST_VOUCHED = 100_000
_TOLD = 8
"""How many of the things that were moved away are named in one answer."""


class Vetoed(ToolError):
    """A program made what no program may make: it was moved away, and its call fails."""

    def __init__(self, text: str) -> None:
        super().__init__(text, kind="denied")
        self.exit_code: int | None = None


class Place:
    """One folder that programs work in, with what is known of it."""

    def __init__(self, root: str) -> None:
        self.tree = Tree(root)
        self._known: dict[object, tuple[int, tuple[str, ...]]] = {}
        self.named: tuple[str, ...] = ()
        """What the settings of git named when the pins were last found."""
        self.vouched: set[str] = set()
        """What calls made under protected names that may."""

    @property
    def root(self) -> str:
        return self.tree.root

    @property
    def size(self) -> int:
        """How many folders are in it; 0 before the first look."""
        return len(self.tree.order)

    def look(self) -> None:
        self.tree.look()

    def pins(self, denials: Denials | None) -> tuple[str, ...]:
        key = ("pins", None if denials is None else denials.key)
        found = self._once(key, lambda: protected.pins(self.tree, denials))
        self.named = vcs.pointed_at(self.tree)
        return (*found, *(path for path in self.named if os.path.lexists(path)))

    def masks(self, denials: Denials) -> tuple[str, ...]:
        key = ("hides", denials.key)
        return self._once(key, lambda: protected.masks(self.tree, denials.hides, key))

    def fixed(self, denials: Denials) -> tuple[str, ...]:
        if not denials.fixes_any:
            return ()
        key = ("fixes", denials.key)
        return self._once(key, lambda: protected.fixed(self.tree, denials.fixes, key))

    def _once(self, key: object, find: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """What ``find`` gives for the tree as it stands, found once for each version of it."""
        known = self._known.get(key)
        if known is not None and known[0] == self.tree.version:
            return known[1]
        found = find()
        if len(self._known) >= 16:
            self._known.clear()
        self._known[key] = (self.tree.version, found)
        return found


@dataclass(frozen=True, slots=True)
class _Before:
    """One place as it stood."""

    version: int
    entries: dict[str, Protected]
    folders: frozenset[str]
    repositories: frozenset[str]
    closed: frozenset[str]
    links: dict[str, str]
    fixed: frozenset[str]
    configs: dict[str, vcs.Kept]
    steps: dict[str, tuple[bytes, ...]]
    """What begun rebases run once they go on, by the file that says so."""
    missing: tuple[str, ...]
    """What a repository's configuration names as hooks or configuration, and is not there."""


class Aftermath:
    """What one program, or one call of one that stays up, is found to have done.

    :param vcs: it may change version-control configuration, by keys
    """

    def __init__(self, places: Sequence[Place], profile: Profile, *, vcs: bool) -> None:
        self._places = places
        self._denials = profile.denials
        self._vcs = vcs
        self._quarantine = Quarantine(profile.quarantine or f"{profile.scratch.rstrip('/')}.quarantine")
        self._before: list[_Before] = []
        self._told: list[str] = []
        self._reported: dict[str, None] = {}
        self._asked_only = True

    def begin(self) -> None:
        """Take what stands now for what was there, as of the last look."""
        self._before = [self._as_it_stands(place) for place in self._places]

    def begin_anew(self) -> list[str]:
        """The same after another look; what was told is forgotten. Gives what has appeared under protected names since the
        last one, and no call that may is known to have made."""
        self._told = []
        self._reported = {}
        self._asked_only = True
        found: list[str] = []
        for place, before in zip(self._places, self._before, strict=True):
            place.look()
            place.named = vcs.pointed_at(place.tree)
            now = place.tree.protected()
            fresh = [
                path
                for path, entry in now.items()
                if path not in before.entries
                and path not in place.vouched
                and not protected.is_open(entry, self._denials)
            ]
            fresh += [path for path, target in before.links.items() if path in now and _target(path) != target]
            found += [visible(path[len(place.root.rstrip("/")) + 1 :]) for path in sorted(fresh)]
        self.begin()
        return found

    def changeable(self) -> frozenset[str]:
        """What is not pinned, because it is compared afterwards."""
        return frozenset(path for before in self._before for path in before.configs)

    def veto(self) -> Vetoed | None:
        """What was found by all looks so far; None where there is nothing to find fault with."""
        if not self._told:
            return None
        more = len(self._told) - _TOLD
        told = "; ".join(self._told[:_TOLD]) + (f"; and {more} more" if more > 0 else "")
        names = (
            "that no program may write unless a rule of fs.write names them"
            if self._asked_only
            else "that no program may write, whatever rules say"
        )
        return Vetoed(
            f"the call failed for what its program made under names {names}: "
            f"{told}. Everything else it did stays as it is"
        )

    def notices(self) -> tuple[str, ...]:
        """Return what the program made that stays, and from which a tool runs code; empty where there is nothing."""
        if not self._reported:
            return ()
        more = len(self._reported) - _TOLD
        made = ", ".join([*self._reported][:_TOLD]) + (f" and {more} more" if more > 0 else "")
        return (f"this call made {made}: a tool that a person starts here runs or loads code from it. Say so to them",)

    def look(self) -> None:
        """Compare, and move away or put back what may not stay."""
        for place, before in zip(self._places, self._before, strict=True):
            self._open_up(place, before)
            tree = place.tree
            if tree.version != before.version or before.links or before.configs or before.missing or before.steps:
                self._settle(place, before)
                place.look()
                if self._vcs and len(place.vouched) < _MOST_VOUCHED:
                    place.vouched.update(path for path in tree.protected() if path not in before.entries)

    def _as_it_stands(self, place: Place) -> _Before:
        tree = place.tree
        entries = tree.protected()
        return _Before(
            tree.version,
            entries,
            frozenset(folder.path for folder in tree.order),
            frozenset(tree.repositories()),
            frozenset(tree.closed()),
            {
                path: _target(path)
                for path, entry in entries.items()
                if entry.link and not protected.is_open(entry, self._denials)
            },
            frozenset(() if self._denials is None else place.fixed(self._denials)),
            vcs.snapshot(tree) if self._vcs else {},
            vcs.steps_that_run(tree),
            tuple(path for path in place.named if not os.path.lexists(path)),
        )

    @staticmethod
    def _open_up(place: Place, before: _Before) -> None:
        """Look into folders that the program has closed, too."""
        place.look()
        for _ in range(_OPENED_IN_ONE_LOOK):
            shut = [path for path in place.tree.closed() if path not in before.closed]
            opened = [path for path in shut if make_readable(place.root, path)]
            if not opened:
                return
            place.look()

    def _settle(self, place: Place, before: _Before) -> None:
        tree = place.tree
        taken: list[str] = []
        for path, why, what in sorted(self._faults(place, before), key=lambda found: found[0].count("/")):
            if any(path == done or path.startswith(done + "/") for done in taken):
                continue
            taken.append(path)
            self._take(tree, path, why, what, before)
        for path, target in before.links.items():
            if _target(path) != target:
                self._relink(tree.root, path, target)
        known = {step for steps in before.steps.values() for step in steps}
        for path, steps in vcs.steps_that_run(tree).items():
            if planted := [step for step in steps if step not in known]:
                self._unplant(tree, path, planted, known)

    def _faults(self, place: Place, before: _Before) -> Iterator[tuple[str, Protection | None, str]]:
        """``(path, why it is protected, what is wrong)`` of all that may not stay; what is to be moved is the path."""
        tree = place.tree
        now = tree.protected()
        fresh = [path for path in tree.repositories() if path not in before.repositories and path not in before.folders]
        cloned = self._cloned(fresh, before)
        for path, entry in now.items():
            prior = before.entries.get(path)
            if protected.is_open(entry, self._denials) or (entry.why.asks and protected.beneath_any(path, cloned)):
                if prior is None and not entry.why.held and not protected.beneath_any(path, cloned):
                    self._reported[visible(path[len(tree.root.rstrip("/")) + 1 :])] = None
                continue
            if prior is not None and not entry.link and not prior.link and path not in before.configs:
                continue  # mounted over, so it is what it was
            if prior is not None and prior.link and entry.link and _target(path) == before.links.get(path):
                continue
            kept = before.configs.get(path)
            problem = vcs.fault(tree, entry, kept) if self._vcs else "it is new"
            if problem is None:
                continue
            repository = min((one for one in fresh if path.startswith(one + "/")), key=len, default=None)
            if entry.why.kind == "hook" and self._vcs:
                repository = None  # the samples' neighbours go, the repository stays
            yield repository or path, entry.why, problem
        for path, kept in before.configs.items():
            if path not in now and (problem := vcs.lost(tree, path, kept)) is not None:
                yield path, before.entries[path].why, problem
        named = frozenset(vcs.pointed_at(tree) if before.missing else ())
        for path in before.missing:
            if path in named and os.path.lexists(path):
                yield path, Protection("hook"), "a repository's configuration names it"
        if self._denials is not None:
            for path in place.fixed(self._denials):
                if path not in before.fixed and not protected.beneath_any(path, before.fixed):
                    yield path, None, "a rule denies writing it"

    def _cloned(self, fresh: Sequence[str], before: _Before) -> frozenset[str]:
        """Return the work trees that are new with their repositories: a person who clones asks for the files in them."""
        if not self._vcs:
            return frozenset()
        trees = (path.rpartition("/")[0] for path in fresh if plain(path.rpartition("/")[2]) == GIT)
        return frozenset(tree for tree in trees if tree not in before.folders)

    def _take(self, tree: Tree, path: str, why: Protection | None, what: str, before: _Before) -> None:
        shown = visible(path[len(tree.root.rstrip("/")) + 1 :])
        is_repository = path not in before.configs and path in tree.repositories()
        try:
            kept = self._quarantine.take(tree.root, path)
            became = "is gone again" if kept is None else f"was moved to {kept}" if kept else "was removed"
            if (original := before.configs.get(path)) is not None:
                vcs.restore(tree.root, path, original)
                became = "was put back as it was before"
        except OSError as error:
            became = f"could not be moved away ({error.strerror}) and has to be removed by a person"
        if why is None or not why.asks:
            self._asked_only = False
        if why is None:
            self._told.append(f"{shown} {became}, since {what}")
        elif why.asks:
            self._told.append(
                f"{shown} {became}, since it {why.what}; 'allow fs.write {shown}' is a rule that names it"
            )
        elif is_repository:
            detail = f" ({what})" if self._vcs else ""
            self._told.append(
                f"{shown} is a new repository with configuration of its own{detail} and {became}; a repository is made "
                "by git.init or git.clone, which have the capability vcs.config as bash never has, or by a person"
            )
        else:
            self._told.append(f"{shown} {became}, since {_because(why, what)}")

    def _unplant(self, tree: Tree, path: str, planted: Sequence[bytes], known: Collection[bytes]) -> None:
        """Take the steps that run a command out of a rebase that has begun."""
        self._asked_only = False
        shown = visible(path[len(tree.root.rstrip("/")) + 1 :])
        what = visible(", ".join(step.decode("utf-8", "replace")[:100] for step in planted[:3]))
        try:
            rest = vcs.without_steps(tree, path, known)
            if rest is None:
                self._quarantine.take(tree.root, path)
            else:
                vcs.restore(tree.root, path, rest)
        except OSError as error:
            self._told.append(
                f"{shown} would run {what}, could not be changed ({error.strerror}), and a person has to look"
            )
        else:
            self._told.append(f"{shown} would run {what} once a person lets git go on, and was left without that")

    def _relink(self, root: str, path: str, target: str) -> None:
        """Put back a protected link that was changed or removed."""
        shown = visible(path[len(root.rstrip("/")) + 1 :])
        try:
            with contextlib.suppress(FileNotFoundError):
                self._quarantine.take(root, path)
            parent = open_parent(root, path)
            if parent is None:
                return
            try:
                os.symlink(target, path.rpartition("/")[2], dir_fd=parent)
            finally:
                os.close(parent)
        except OSError as error:
            self._asked_only = False
            self._told.append(f"{shown} was a link and could not be put back ({error.strerror})")
        else:
            self._asked_only = False
            self._told.append(f"{shown} is a link that was changed, and was put back")


def _because(why: Protection, what: str) -> str:
    return f"it {why.what}" + ("" if what == "it is new" else f", and {what}")


def _target(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
