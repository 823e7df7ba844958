"""The check after a program has run: files under protected names are moved away or put back.

Names are compared with the names at the program's start. Contents are compared for files that may change in some keys only,
and for every mounted-over file, since a mount ends when an outside process replaces its file. A newly made repository is
moved away as a whole, since one without configuration and hooks would be broken.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.protected.protected import GIT, Protection, plain
from handrail.contract.sandbox import Denials, Profile
from handrail.contract.text.neutral import visible
from handrail.runtime.files import replace
from handrail.runtime.guard import git as vcs
from handrail.runtime.guard.quarantine import (
    Fate,
    Kept,
    Original,
    Originals,
    Quarantine,
    make_readable,
    open_parent,
    restore,
)
from handrail.runtime.guard.running import running_programs
from handrail.sandbox.view import protected
from handrail.sandbox.view.tree import DEEPEST, LONGEST, Protected, Tree, check_passing

_OPENED_IN_ONE_LOOK = 64
_TOLD = 8
"""How many findings one message names."""
_TOO_MANY_HIDDEN = (
    f"rules hide such names from programs, and a sandbox can hide at most {protected.MOST_MOUNTS:,} of them"
)
_NOTHING: Mapping[str, Original] = {}
_MOST_TOLD = 1_000
_MOST_ORIGINALS = 2_000
_UNLOOKED = (
    f"Handrail cannot read it: it is closed to its owner, or more than {DEEPEST} folders deep, or its "
    f"path has more than {LONGEST:,} bytes"
)


class Vetoed(ToolError):
    """An error for a program that changed protected files: its changes were undone and its call fails."""

    def __init__(self, text: str) -> None:
        super().__init__(text, kind="denied")
        self.exit_code: int | None = None


class Place:
    """A folder that programs work in, with the cached results of looking at it."""

    def __init__(self, root: str) -> None:
        self.tree = Tree(root)
        self.originals = Originals(root)
        self._known: dict[object, tuple[int, tuple[str, ...]]] = {}
        self._shared: tuple[object, Mapping[str, tuple[int, int]]] = (), {}
        self._over: dict[object, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self.pointed = vcs.Pointed()
        """What git's settings named when the pinned paths were last found."""

    @property
    def root(self) -> str:
        return self.tree.root

    @property
    def size(self) -> int:
        """The number of folders in it; 0 before the first look."""
        return len(self.tree.order)

    @property
    def files(self) -> int:
        """The number of files at the last look."""
        return self.tree.files

    def look(self) -> None:
        """Read the folders that have changed since the last look."""
        self.tree.look()

    def pins(self, denials: Denials | None) -> tuple[str, ...]:
        """Return the paths to mount read-only: protected files, and files that git's settings name."""
        key = ("pins", None if denials is None else denials.key)
        found = self._once(key, lambda: protected.pins(self.tree, denials))
        self.pointed = vcs.pointed_at(self.tree)
        return (*found, *(path for path in self.pointed.targets if os.path.lexists(path)))

    def masks(self, denials: Denials | None) -> tuple[str, ...]:
        """Return the paths that programs do not see; without ``denials`` those that could not be read."""
        if denials is None:
            return tuple(self.tree.closed())
        key = ("hides", denials.key)
        return self._once(key, lambda: protected.masks(self.tree, denials.hides, key))

    def fixed(self, denials: Denials) -> tuple[str, ...]:
        """Return the paths that rules keep programs from writing."""
        if not denials.fixes_any:
            return ()
        key = ("fixes", denials.key)
        return self._once(key, lambda: protected.fixed(self.tree, denials.fixes, key))

    def shared(self, others: Sequence[Place]) -> Mapping[str, tuple[int, int]]:
        """Return the files in this and the other places that have names outside of them."""
        trees = [place.tree for place in (self, *others)]
        versions = tuple((tree.root, tree.version) for tree in trees)
        if self._shared[0] != versions:
            self._shared = versions, replace.shared(trees)
        return self._shared[1]

    def mounted_over(
        self, others: Sequence[Place], writable: Sequence[Place], pinned: tuple[str, ...], masked: tuple[str, ...]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the pinned and the masked paths that a sandbox mounts over.

        Other names of pinned files are included. If there are too many paths, whole folders replace the paths in them.

        :raises ToolError: ``unavailable`` if there are still too many
        """
        trees = [place.tree for place in (self, *others)]
        key = *((tree.root, tree.version) for tree in trees), len(writable), pinned, masked
        known = self._over.get(key)
        if known is None:
            again = protected.second_names([place.tree for place in writable], pinned)
            known = protected.fit(trees, tuple(dict.fromkeys((*pinned, *again))), masked)
            if len(self._over) >= 16:
                self._over.clear()
            self._over[key] = known
        return known

    def _once(self, key: object, find: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """Return the result of ``find``, computed once for each version of the tree."""
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
    """The state of one folder before a program ran."""

    version: int
    entries: dict[str, Protected]
    folders: frozenset[str]
    repositories: frozenset[str]
    closed: frozenset[str]
    links: dict[str, str]
    fixed: frozenset[str]
    hidden: tuple[str, ...]
    configs: dict[str, Kept]
    steps: dict[str, tuple[bytes, ...]]
    """The rebase steps that run a command, by the file that lists them."""
    missing: tuple[str, ...]
    """Hooks and configuration that git's settings name and that do not exist."""
    dangling: dict[str, Protection]
    """Targets of protected links that do not exist, with the protection of the link."""


class Aftermath:
    """A check of what a program, or one call of a long-running process, changed in its folders.

    :param vcs: whether the program may change version-control configuration, by keys
    """

    def __init__(self, places: Sequence[Place], profile: Profile, *, vcs: bool) -> None:
        self._places = places
        self._denials = profile.denials
        self._vcs = vcs
        self._quarantine = Quarantine(profile.quarantine or f"{profile.scratch.rstrip('/')}.quarantine")
        self._before: list[_Before] = []
        self._mounted: list[dict[str, Original]] = []
        self._told: list[str] = []
        self._more = 0
        self._reported = 0
        self._asked_only = True
        self._stays: dict[str, None] = {}
        """Files that the program made, that stay, and that a tool runs or loads as code."""
        self._looked_at: dict[str, int] = {}

    def begin(self) -> None:
        """Take the state at the last look as the baseline."""
        self._before = [self._as_it_stands(place) for place in self._places]

    def mounted(self, paths: Iterable[str]) -> None:
        """Remember the paths that are mounted over read-only, to compare them after the program has ended.

        A configuration that is compared by keys anyway is left out.
        """
        self._mounted = [{} for _ in self._places]
        order = sorted(range(len(self._places)), key=lambda number: len(self._places[number].root), reverse=True)
        for path in paths:
            for number in order:
                if path.startswith(self._places[number].root.rstrip("/") + "/"):
                    original = self._places[number].originals.take(path)
                    if original is not None and path not in self._before[number].configs:
                        self._mounted[number][path] = original
                    break
        for place, mine in zip(self._places, self._mounted, strict=True):
            if place.originals.count > max(_MOST_ORIGINALS, 2 * len(mine)):
                place.originals.retain(set(mine))

    def begin_anew(self) -> list[str]:
        """Take a new baseline for the next call, and return what was found since the last report.

        The result includes what has appeared under protected names since then and was not made by a call that may do
        so. Earlier findings are dropped.
        """
        found = self._told[self._reported :]
        self._told, self._more, self._reported = [], 0, 0
        self._asked_only, self._stays = True, {}
        for place, before in zip(self._places, self._before, strict=True):
            place.look()
            place.pointed = vcs.pointed_at(place.tree)
            now = place.tree.protected()
            fresh = [
                path
                for path, entry in now.items()
                if path not in before.entries
                and path not in running_programs.vouched
                and not protected.is_open(entry, self._denials)
            ]
            fresh += [
                path
                for path, target in before.links.items()
                if (path in now or path not in before.entries) and _target(path) != target
            ]
            found += [visible(path[len(place.root.rstrip("/")) + 1 :]) for path in sorted(fresh)]
        self.begin()
        self.mounted([path for mine in self._mounted for path in mine])
        return found

    def changeable(self) -> frozenset[str]:
        """Return the paths that are not pinned because they are compared afterwards."""
        return frozenset(path for before in self._before for path in before.configs)

    def veto(self) -> Vetoed | None:
        """Return the error for everything found so far; None if nothing was found."""
        if not self._told:
            return None
        more = len(self._told) + self._more - _TOLD
        told = "; ".join(self._told[:_TOLD]) + (f"; and {more} more" if more > 0 else "")
        but = "unless an fs.write rule names the path" if self._asked_only else "whatever the rules allow"
        return Vetoed(
            f"The call failed because its program made or changed protected files: {told}. No program may "
            f"write these, {but}. The other changes of the program stay. Ask the user if such a change is "
            "needed."
        )

    def report(self) -> Vetoed | None:
        """Return the error as :meth:`veto` does, and mark its findings as reported.

        For a call of a long-running process.
        """
        self._reported = len(self._told)
        return self.veto()

    def notices(self) -> tuple[str, ...]:
        """Return a note about files that the program made, that stay, and that a tool runs as code."""
        if not self._stays:
            return ()
        more = len(self._stays) - _TOLD
        made = ", ".join([*self._stays][:_TOLD]) + (f" and {more} more" if more > 0 else "")
        return (
            f"This call made {made}. Tools that the user starts here run or load code from it. Tell the user about it.",
        )

    def look(self) -> None:
        """Compare the folders with the baseline after a program or call, and undo what may not stay.

        :raises ToolError: ``unavailable`` if the system is short of a resource
        """
        for place, before, mounted in zip(self._places, self._before, self._mounted, strict=True):
            self._open_up(place, before)
            told = len(self._told)
            for path, original in mounted.items():
                self._check_mounted(place, path, original, before)
            if len(self._told) > told:
                place.look()
            tree = place.tree
            changed = tree.version != before.version
            if changed or before.links or before.configs or before.missing or before.dangling or before.steps:
                self._settle(place, before)
                place.look()
                if self._vcs:
                    running_programs.vouch(path for path in tree.protected() if path not in before.entries)

    def look_meanwhile(self) -> None:
        """Move away new files under protected names while the program runs, as of the last look."""
        if self._vcs:
            return  # its changes are evaluated once they are complete
        for place, before in zip(self._places, self._before, strict=True):
            version = place.tree.version
            if self._looked_at.get(place.root, before.version) != version:
                self._looked_at[place.root] = version
                self._settle(place, before, meanwhile=True)

    def _tell(self, text: str, *, asks: bool = False) -> None:
        """Add a finding.

        :param asks: whether a rule could have allowed it
        """
        self._asked_only = self._asked_only and asks
        if len(self._told) < _MOST_TOLD:
            self._told.append(text)
        else:
            self._more += 1

    def _as_it_stands(self, place: Place) -> _Before:
        tree = place.tree
        entries = tree.protected()
        links = protected.held_links(tree, entries.values(), self._denials)
        return _Before(
            tree.version,
            entries,
            frozenset(folder.path for folder in tree.order),
            frozenset(tree.repositories()),
            frozenset(tree.closed()),
            {path: _target(path) for path in self._links(place, entries, links)},
            frozenset(() if self._denials is None else place.fixed(self._denials)),
            () if self._denials is None else place.masks(self._denials),
            vcs.snapshot(tree) if self._vcs else {},
            vcs.steps_that_run(tree),
            tuple(path for path in place.pointed.targets if not os.path.lexists(path)),
            self._dangling(place, links),
        )

    def _links(self, place: Place, entries: Mapping[str, Protected], links: Mapping[str, Protection]) -> Iterator[str]:
        """Yield the links that must not change.

        These are links with a protected name, links that ``links`` lead on to, and links on the way to what git's
        settings name.
        """
        yield from (path for path in links if path in entries)
        folders = (entry for entry in entries.values() if entry.folder and not protected.is_open(entry, self._denials))
        pinned = {*(entry.path for entry in folders), *place.pointed.targets}
        ways = (way for path in links for way in protected.links_on_the_way(place.root, path))
        yield from (path for path in (*ways, *place.pointed.links) if not protected.beneath_any(path, pinned))

    @staticmethod
    def _dangling(place: Place, links: Mapping[str, Protection]) -> dict[str, Protection]:
        """Return the missing targets of ``links`` below the root, with the protection of the link."""
        top = place.root.rstrip("/") + "/"
        ends = ((os.path.realpath(path), why) for path, why in links.items())
        return {end: why for end, why in ends if end.startswith(top) and not os.path.lexists(end)}

    @staticmethod
    def _open_up(place: Place, before: _Before) -> None:
        """Look also into folders that the program has closed."""
        place.look()
        for _ in range(_OPENED_IN_ONE_LOOK):
            shut = [path for path in place.tree.closed() if path not in before.closed]
            opened = [path for path in shut if make_readable(place.root, path)]
            if not opened:
                return
            place.look()

    def _settle(self, place: Place, before: _Before, *, meanwhile: bool = False) -> None:
        tree = place.tree
        taken: list[str] = []
        for path, why, what in sorted(
            self._faults(place, before, meanwhile=meanwhile), key=lambda found: found[0].count("/")
        ):
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

    def _faults(
        self, place: Place, before: _Before, *, meanwhile: bool
    ) -> Iterator[tuple[str, Protection | None, str]]:
        """Yield ``(path, protection, problem)`` for everything that may not stay."""
        now = place.tree.protected()
        yield from self._faults_by_name(place, before, now)
        for path, kept in before.configs.items():
            if path not in now and (problem := vcs.lost(place.tree, path, kept)) is not None:
                yield path, before.entries[path].why, problem
        yield from _faults_where_names_lead(place, before)
        for path in () if meanwhile else place.tree.closed():
            if path not in before.closed and os.path.lexists(path):
                yield path, None, _UNLOOKED
        if self._denials is not None:
            yield from _faults_by_denials(place, before, self._denials, hides=not meanwhile)

    def _faults_by_name(
        self, place: Place, before: _Before, now: Mapping[str, Protected]
    ) -> Iterator[tuple[str, Protection | None, str]]:
        """Yield the faults of protected names, and note what rules or a clone allow."""
        tree = place.tree
        fresh = [path for path in tree.repositories() if path not in before.repositories and path not in before.folders]
        moved = self._mounted_files(place)
        judged = self._vcs or running_programs.changes_configuration(tree.root)
        cloned = self._cloned(fresh, before)
        for path, entry in now.items():
            is_new = path not in before.entries
            if is_new and _has_moved(place, path, entry, moved):
                continue
            if self._is_asked_for(path, entry, cloned):
                if is_new:
                    self._note_made(tree, path, entry, cloned)
                continue
            if _is_kept(path, entry, before):
                continue
            by_keys = judged or path in running_programs.vouched
            problem = vcs.fault(tree, entry, before.configs.get(path)) if by_keys else "it is new"
            if problem is not None:
                yield _to_move(path, entry, fresh, by_keys=by_keys), entry.why, problem

    def _is_asked_for(self, path: str, entry: Protected, cloned: Collection[str]) -> bool:
        """Return whether a rule opens a protected name, or the file is in a cloned work tree."""
        return protected.is_open(entry, self._denials) or (entry.why.asks and protected.beneath_any(path, cloned))

    def _note_made(self, tree: Tree, path: str, entry: Protected, cloned: Collection[str]) -> None:
        if not entry.why.held and not protected.beneath_any(path, cloned):
            self._stays[visible(path[len(tree.root.rstrip("/")) + 1 :])] = None

    def _check_mounted(self, place: Place, path: str, original: Original, before: _Before) -> None:
        """Restore a file that was mounted over if the mount did not stay on it to the end.

        The same file with other content is the user's change, since the mount was on it all the time. A git
        configuration that differs in harmless keys only may stay too. Everything else can be the program's: it is moved
        away, never deleted.
        """
        tree = place.tree
        fate = place.originals.fate(path, original)
        entry = before.entries.get(path)
        if _may_stay(tree, entry, original, fate):
            return
        shown = visible(path[len(tree.root.rstrip("/")) + 1 :])
        if original.kept is None and (fate == "gone" or entry is None):
            what = "is gone" if fate == "gone" else "was replaced"
            self._tell(f"{shown} {what} while the program ran, and cannot be put back")
            return
        try:
            became = self._put_back(tree.root, path, original, fate)
        except FileNotFoundError:
            return  # its folder is missing too
        except OSError as error:
            check_passing(error, path)  # the next look retries
            became = f"could not be put back ({error.strerror}) and the user has to look at it"
        self._tell(
            f"{shown} {became}, because another process replaced it while the program ran, and the program "
            "could write it from then on"
        )

    def _put_back(self, root: str, path: str, original: Original, fate: Fate) -> str:
        """Restore a path and return the result as a message says it."""
        moved = ""
        if fate == "replaced" and (kept := self._quarantine.take(root, path)) is not None:
            moved = f"; the file in its place was moved to {kept}" if kept else "; the file in its place was removed"
        if original.kept is None:
            return f"has changed{moved}"
        restore(root, path, original.kept)
        return f"was restored{moved}"

    def _mounted_files(self, place: Place) -> frozenset[object]:
        """Return the identities of the mounted-over files, to recognise them under another path.

        A program can neither move such a file nor link it.
        """
        mounted = next(
            (mine for other, mine in zip(self._places, self._mounted, strict=True) if other is place), _NOTHING
        )
        return frozenset(
            (original.identity[:3], original.born)
            for original in mounted.values()
            if original.born is not None and (original.folder or original.links == 1)
        )

    def _cloned(self, fresh: Sequence[str], before: _Before) -> frozenset[str]:
        """Return the work trees that are new together with their repository: a clone includes their files."""
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
                restore(tree.root, path, original)
                became = "was restored"
        except OSError as error:
            check_passing(error, path)  # the next look retries
            became = f"could not be moved away ({error.strerror}) and the user has to remove it"
        if why is None:
            self._tell(f"{shown} {became}, because {what}")
        elif why.asks:
            rule = f"the rule 'allow fs.write {shown}' would allow it"
            self._tell(f"{shown} {became}, because it {why.what}; {rule}", asks=True)
        elif is_repository:
            detail = f" ({what})" if self._vcs else ""
            self._tell(
                f"{shown} is a new repository with its own configuration{detail} and {became}; only the user, or git.init "
                "and git.clone with the capability vcs.config, can create a repository here"
            )
        else:
            self._tell(f"{shown} {became}, because {_because(why, what)}")

    def _unplant(self, tree: Tree, path: str, planted: Sequence[bytes], known: Collection[bytes]) -> None:
        """Remove the steps that run a command from a rebase that has begun."""
        shown = visible(path[len(tree.root.rstrip("/")) + 1 :])
        what = visible(", ".join(step.decode("utf-8", "replace")[:100] for step in planted[:3]))
        try:
            rest = vcs.without_steps(tree, path, known)
            if rest is None:
                self._quarantine.take(tree.root, path)
            else:
                restore(tree.root, path, rest)
        except OSError as error:
            check_passing(error, path)  # the next look retries
            self._tell(
                f"{shown} would run {what}, could not be changed ({error.strerror}), and the user has to look at it"
            )
        else:
            self._tell(
                f"{shown} would run {what} when the user continues the git operation, so this command was removed"
            )

    def _relink(self, root: str, path: str, target: str) -> None:
        """Restore a protected link that was changed or removed."""
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
            check_passing(error, path)  # the next look retries
            self._tell(f"{shown} was a link and could not be put back ({error.strerror})")
        else:
            self._tell(f"{shown} is a protected link that was changed, and was restored")


def _has_moved(place: Place, path: str, entry: Protected, mounted: Collection[object]) -> bool:
    """Return whether another process renamed a folder around a path, and the mount moved with it."""
    return not entry.link and bool(mounted) and place.originals.identify(path) in mounted


def _is_kept(path: str, entry: Protected, before: _Before) -> bool:
    """Return whether a protected name existed before and is unchanged, as far as the names show."""
    prior = before.entries.get(path)
    if prior is None or prior.link != entry.link:
        return False
    if entry.link:
        return _target(path) == before.links.get(path)
    return path not in before.configs  # it was mounted over: _check_mounted compares its content


def _to_move(path: str, entry: Protected, fresh: Sequence[str], *, by_keys: bool) -> str:
    """Return the path to move away: the outermost new repository around ``path``, else ``path`` itself."""
    if entry.why.kind == "hook" and by_keys:
        return path  # other files than samples are moved away, and the repository stays
    return min((one for one in fresh if path.startswith(one + "/")), key=len, default=path)


def _faults_where_names_lead(place: Place, before: _Before) -> Iterator[tuple[str, Protection | None, str]]:
    """Yield the faults in new files that git's settings or a protected link lead to."""
    pointed = vcs.pointed_at(place.tree) if before.missing else vcs.Pointed()
    for path in before.missing:
        made = _outermost(place, path)
        if os.path.lexists(path) and (made in pointed.targets or made in pointed.links):
            yield made, Protection("hook"), "a repository's configuration names it"
    for path, why in before.dangling.items():
        if os.path.lexists(path):
            yield _outermost(place, path), why, "a protected link leads to it"


def _faults_by_denials(
    place: Place, before: _Before, denials: Denials, *, hides: bool
) -> Iterator[tuple[str, Protection | None, str]]:
    """Yield the faults in paths that rules deny.

    :param hides: whether to check hidden paths too
    """
    hidden = place.masks(denials) if hides else ()
    if len(hidden) > protected.MOST_MOUNTS:
        prior_hidden = frozenset(before.hidden)
        for path in hidden:
            if path not in prior_hidden:
                yield path, None, _TOO_MANY_HIDDEN
    for path in place.fixed(denials):
        if path not in before.fixed and not protected.beneath_any(path, before.fixed):
            yield path, None, "a rule denies writing it"


def _may_stay(tree: Tree, entry: Protected | None, original: Original, fate: Fate) -> bool:
    """Return whether the current content of a mounted-over path may stay."""
    if fate in ("same", "edited"):
        return True
    if fate == "gone":
        return original.folder  # a program cannot remove a mount, and a missing file is harmless
    if entry is None or entry.why.kind != "vcs" or original.folder:
        return False
    return vcs.fault(tree, entry, original.kept) is None


def _outermost(place: Place, path: str) -> str:
    """Return the first link on the way to a path; the path itself if there is none."""
    return next(iter(protected.links_on_the_way(place.root, path)), path)


def _because(why: Protection, what: str) -> str:
    return f"it {why.what}" + ("" if what == "it is new" else f", and {what}")


def _target(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
