"""The check after a program has run: files under protected names are moved away or put back.

Names are compared with the names at the program's start. Contents are compared for files that may change in some keys only,
and for every mounted-over file, since a mount ends when an outside process replaces its file. A newly made repository is
moved away as a whole, since one without configuration and hooks would be broken.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.protected.path_protection import GIT, PathProtection, normalise_file_name
from handrail.contract.sandbox_protocol import PathDenials, SandboxProfile
from handrail.contract.struct import Struct
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.runtime.files import atomic_write
from handrail.runtime.guard import git_config_checks as vcs
from handrail.runtime.guard.quarantine import (
    FileFate,
    FileSnapshot,
    OriginalPathState,
    OriginalPathStates,
    QuarantineFolder,
    grant_folder_access_to_owner,
    open_parent,
    restore_file,
)
from handrail.runtime.guard.running_programs import running_programs
from handrail.sandbox.view import protected_mounts
from handrail.sandbox.view.cached_folder_tree import (
    MAX_DEPTH,
    MAX_PATH_BYTES,
    FolderTree,
    ProtectedEntry,
    raise_if_resource_shortage,
)

_MAX_OPENING_ROUNDS = 64
_MAX_NAMED_FINDINGS = 8
"""How many findings one message names."""
_TOO_MANY_HIDDEN_REASON = (
    f"rules hide such names from programs, and a sandbox can hide at most {protected_mounts.MAX_MOUNTS:,} of them"
)
_CHANGED_BELOW_MOUNT = (
    "another process replaced it while the program ran, and the program could write it from then on",
    "the program could write it by another spelling of its name",
)
_NO_ORIGINALS: Mapping[str, OriginalPathState] = {}
_MAX_FINDINGS = 1_000
_MOST_ORIGINALS = 2_000
_UNREADABLE_REASON = (
    f"Handrail cannot read it: it is closed to its owner, or more than {MAX_DEPTH} folders deep, or its "
    f"path has more than {MAX_PATH_BYTES:,} bytes"
)


class ProtectedPathViolation(ToolError):
    """An error for a program that changed protected files: its changes were undone and its call fails."""

    def __init__(self, text: str) -> None:
        super().__init__(text, kind="denied")
        self.exit_code: int | None = None


class GuardedFolder:
    """A folder that programs work in, with the cached results of looking at it."""

    def __init__(self, root: str) -> None:
        self.tree = FolderTree(root)
        self.originals = OriginalPathStates(root)
        self._known: dict[object, tuple[int, tuple[str, ...]]] = {}
        self._shared: tuple[object, Mapping[str, tuple[int, int]]] = (), {}
        self._over: dict[object, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self.git_targets = vcs.GitNamedPaths()
        """What git's settings named when the pinned paths were last found."""

    @property
    def root(self) -> str:
        return self.tree.root

    @property
    def folder_count(self) -> int:
        """The number of folders in it; 0 before the first look."""
        return len(self.tree.order)

    @property
    def file_count(self) -> int:
        """The number of files at the last look."""
        return self.tree.file_count

    def refresh(self) -> None:
        """Read the folders that have changed since the last look."""
        self.tree.refresh()

    def find_paths_to_pin(self, denials: PathDenials | None) -> tuple[str, ...]:
        """Return the paths to mount read-only: protected files, and files that git's settings name."""
        key = ("pins", None if denials is None else denials.key)
        found = self._cache_by_tree_version(
            key, lambda: protected_mounts.find_read_only_protected_paths(self.tree, denials)
        )
        self.git_targets = vcs.find_paths_named_by_git(self.tree)
        return (*found, *(path for path in self.git_targets.targets if os.path.lexists(path)))

    def find_paths_to_mask(self, denials: PathDenials | None) -> tuple[str, ...]:
        """Return the paths that programs do not see; without ``denials`` those that could not be read."""
        # A folder that could not be read may contain protected files, so programs do not see it even without rules.
        if denials is None:
            return tuple(self.tree.list_unreadable_folders())
        key = ("hides", denials.key)
        return self._cache_by_tree_version(
            key, lambda: protected_mounts.find_hidden_and_unreadable_paths(self.tree, denials.is_hidden, key)
        )

    def find_rule_read_only_paths(self, denials: PathDenials) -> tuple[str, ...]:
        """Return the paths that rules keep programs from writing."""
        if not denials.has_read_only:
            return ()
        key = ("fixes", denials.key)
        return self._cache_by_tree_version(
            key, lambda: protected_mounts.find_outermost_matching_paths(self.tree, denials.is_read_only, key)
        )

    def find_externally_linked_files(self, others: Sequence[GuardedFolder]) -> Mapping[str, tuple[int, int]]:
        """Return the files in this and the other places that have names outside of them."""
        trees = [place.tree for place in (self, *others)]
        versions = tuple((tree.root, tree.version) for tree in trees)
        if self._shared[0] != versions:
            self._shared = versions, atomic_write.find_outside_hard_links(trees)
        return self._shared[1]

    def plan_protective_mounts(
        self,
        others: Sequence[GuardedFolder],
        writable: Sequence[GuardedFolder],
        pinned: tuple[str, ...],
        masked: tuple[str, ...],
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the pinned and the masked paths that a sandbox mounts over.

        Other names of pinned files are included. If there are too many paths, whole folders replace the paths in them.

        :raises ToolError: ``unavailable`` if there are still too many
        """
        trees = [place.tree for place in (self, *others)]
        key = *((tree.root, tree.version) for tree in trees), len(writable), pinned, masked
        if (known := self._over.get(key)) is None:
            again = protected_mounts.find_hard_links_of_pinned([place.tree for place in writable], pinned)
            known = protected_mounts.fold_mounts_into_folders(trees, tuple(dict.fromkeys((*pinned, *again))), masked)
            if len(self._over) >= 16:
                self._over.clear()
            self._over[key] = known
        return known

    def _cache_by_tree_version(self, key: object, find: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """Return the result of ``find``, computed once for each version of the tree."""
        if (known := self._known.get(key)) is not None and known[0] == self.tree.version:
            return known[1]
        found = find()
        if len(self._known) >= 16:
            self._known.clear()
        self._known[key] = (self.tree.version, found)
        return found


class _FolderState(Struct, frozen=True):
    """The state of one folder before a program ran."""

    version: int
    entries: dict[str, ProtectedEntry]
    folders: frozenset[str]
    repositories: frozenset[str]
    closed: frozenset[str]
    links: dict[str, str]
    fixed: frozenset[str]
    hidden: tuple[str, ...]
    configs: dict[str, FileSnapshot]
    rebase_commands: dict[str, tuple[bytes, ...]]
    """The rebase steps that run a command, by the file that lists them."""
    missing: tuple[str, ...]
    """Hooks and configuration that git's settings name and that do not exist."""
    dangling: dict[str, PathProtection]
    """Targets of protected links that do not exist, with the protection of the link."""


class PostRunCheck:
    """A check of what a program, or one call of a long-running process, changed in its folders.

    :param vcs: whether the program may change version-control configuration, by keys
    """

    def __init__(self, places: Sequence[GuardedFolder], profile: SandboxProfile, *, vcs: bool) -> None:
        self._places = places
        self._denials = profile.denials
        self._vcs = vcs
        self._quarantine = QuarantineFolder(profile.quarantine or f"{profile.scratch.rstrip('/')}.quarantine")
        self._before: list[_FolderState] = []
        self._mounted: list[dict[str, OriginalPathState]] = []
        self._findings: list[str] = []
        self._unnamed_findings = 0
        self._reported = 0
        self._rules_could_allow = True
        self._kept_paths: dict[str, None] = {}
        """Files that the program made, that stay, and that a tool runs or loads as code."""
        self._checked_versions: dict[str, int] = {}

    def set_baseline(self) -> None:
        """Take the state at the last look as the baseline."""
        self._before = [self._take_state(place) for place in self._places]

    def remember_mounted_paths(self, paths: Iterable[str]) -> None:
        """Remember the paths that are mounted over read-only, to compare them after the program has ended.

        A configuration that is compared by keys anyway is left out.
        """
        self._mounted = [{} for _ in self._places]
        again = [  # a program may reach these below the mounts
            entry.path
            for place, before in zip(self._places, self._before, strict=True)
            for entry in (before.entries.values() if place.tree.can_respelling_bypass_mounts else ())
            if not entry.link and not protected_mounts.is_writable_by_programs(entry, self._denials)
        ]
        # A root can lie in another root. The innermost one is the place whose tree knows the path.
        order = sorted(range(len(self._places)), key=lambda number: len(self._places[number].root), reverse=True)
        for path in dict.fromkeys((*paths, *again)):
            for number in order:
                if path.startswith(self._places[number].root.rstrip("/") + "/"):
                    original = self._places[number].originals.remember(path)
                    if original is not None and path not in self._before[number].configs:
                        self._mounted[number][path] = original
                    break
        for place, mine in zip(self._places, self._mounted, strict=True):
            # Contents that no running program needs any more would fill the memory over time.
            if place.originals.count > max(_MOST_ORIGINALS, 2 * len(mine)):
                place.originals.forget_all_except(set(mine))

    def retake_baseline(self) -> list[str]:
        """Take a new baseline for the next call, and return what was found since the last report.

        The result includes what has appeared under protected names since then and was not made by a call that may do
        so. Earlier findings are dropped.
        """
        found = self._findings[self._reported :]
        self._findings, self._unnamed_findings, self._reported = [], 0, 0
        self._rules_could_allow, self._kept_paths = True, {}
        for place, before in zip(self._places, self._before, strict=True):
            place.refresh()
            place.git_targets = vcs.find_paths_named_by_git(place.tree)
            now = place.tree.get_protected_entries()
            fresh = [
                path
                for path, entry in now.items()
                if path not in before.entries
                and path not in running_programs.vouched
                and not protected_mounts.is_writable_by_programs(entry, self._denials)
            ]
            fresh += [
                path
                for path, target in before.links.items()
                if (path in now or path not in before.entries) and _read_link(path) != target
            ]
            found += [escape_terminal_controls(path[len(place.root.rstrip("/")) + 1 :]) for path in sorted(fresh)]
        self.set_baseline()
        self.remember_mounted_paths([path for mine in self._mounted for path in mine])
        return found

    def list_compared_paths(self) -> frozenset[str]:
        """Return the paths that are not pinned because they are compared afterwards."""
        return frozenset(path for before in self._before for path in before.configs)

    def get_violation_so_far(self) -> ProtectedPathViolation | None:
        """Return the error for everything found so far; None if nothing was found."""
        if not self._findings:
            return None
        more = len(self._findings) + self._unnamed_findings - _MAX_NAMED_FINDINGS
        text = "; ".join(self._findings[:_MAX_NAMED_FINDINGS]) + (f"; and {more} more" if more > 0 else "")
        but = "unless an fs.write rule names the path" if self._rules_could_allow else "whatever the rules allow"
        return ProtectedPathViolation(
            f"The call failed because its program created or changed protected files: {text}. No program can write these,"
            f" {but}. The other changes of the program stay. Ask the user if such a change is "
            "needed."
        )

    def take_unreported_violation(self) -> ProtectedPathViolation | None:
        """Return the error as :meth:`get_violation_so_far` does, and mark its findings as reported.

        For a call of a long-running process.
        """
        self._reported = len(self._findings)
        return self.get_violation_so_far()

    def describe_kept_code_files(self) -> tuple[str, ...]:
        """Return a note about files that the program made, that stay, and that a tool runs as code."""
        if not self._kept_paths:
            return ()
        more = len(self._kept_paths) - _MAX_NAMED_FINDINGS
        made = ", ".join([*self._kept_paths][:_MAX_NAMED_FINDINGS]) + (f" and {more} more" if more > 0 else "")
        return (
            f"This call made {made}. Tools that the user starts here run or load code from it. Tell the user about it.",
        )

    def check_and_restore(self) -> None:
        """Compare the folders with the baseline after a program or call, and undo what may not stay.

        :raises ToolError: ``unavailable`` if the system is short of a resource
        """
        for place, before, mounted in zip(self._places, self._before, self._mounted, strict=True):
            # A program could hide its changes in a folder that it closes before its end.
            self._open_closed_folders(place, before)
            finding_count = len(self._findings)
            for path, original in mounted.items():
                self._restore_lost_mounted_file(place, path, original, before)
            # The restored files must not count as changes of the program below.
            if len(self._findings) > finding_count:
                place.refresh()
            tree = place.tree
            changed = tree.version != before.version
            # The version of the tree covers names. The others can change without a change of any folder.
            if changed or before.links or before.configs or before.missing or before.dangling or before.rebase_commands:
                self._undo_faults(place, before)
                place.refresh()
                if self._vcs:
                    running_programs.remember_checked_paths(
                        path for path in tree.get_protected_entries() if path not in before.entries
                    )

    def quarantine_while_running(self) -> None:
        """Move away new files under protected names while the program runs, as of the last look."""
        if self._vcs:
            return  # its changes are evaluated once they are complete
        for place, before in zip(self._places, self._before, strict=True):
            version = place.tree.version
            if self._checked_versions.get(place.root, before.version) != version:
                self._checked_versions[place.root] = version
                self._undo_faults(place, before, meanwhile=True)

    def _add_finding(self, text: str, *, asks: bool = False) -> None:
        """Add a finding.

        :param asks: whether a rule could have allowed it
        """
        self._rules_could_allow = self._rules_could_allow and asks
        if len(self._findings) < _MAX_FINDINGS:
            self._findings.append(text)
        else:
            self._unnamed_findings += 1

    def _take_state(self, place: GuardedFolder) -> _FolderState:
        tree = place.tree
        entries = tree.get_protected_entries()
        links = protected_mounts.find_protected_links(tree, entries.values(), self._denials)
        return _FolderState(
            tree.version,
            entries,
            frozenset(folder.path for folder in tree.order),
            frozenset(tree.list_git_directories()),
            frozenset(tree.list_unreadable_folders()),
            {path: _read_link(path) for path in self._find_fixed_links(place, entries, links)},
            frozenset(() if self._denials is None else place.find_rule_read_only_paths(self._denials)),
            () if self._denials is None else place.find_paths_to_mask(self._denials),
            vcs.snapshot_configs(tree) if self._vcs else {},
            vcs.find_rebase_exec_steps(tree),
            tuple(path for path in place.git_targets.targets if not os.path.lexists(path)),
            self._find_missing_link_targets(place, links),
        )

    def _find_fixed_links(
        self, place: GuardedFolder, entries: Mapping[str, ProtectedEntry], links: Mapping[str, PathProtection]
    ) -> Iterator[str]:
        """Yield the links that must not change.

        These are links with a protected name, links that ``links`` lead on to, and links on the way to what git's
        settings name.
        """
        yield from (path for path in links if path in entries)
        folders = (
            entry
            for entry in entries.values()
            if entry.folder and not protected_mounts.is_writable_by_programs(entry, self._denials)
        )
        pinned = {*(entry.path for entry in folders), *place.git_targets.targets}
        ways = (way for path in links for way in protected_mounts.find_links_on_path(place.root, path))
        yield from (
            path
            for path in (*ways, *place.git_targets.links)
            if not protected_mounts.is_within_any_folder(path, pinned)
        )

    @staticmethod
    def _find_missing_link_targets(
        place: GuardedFolder, links: Mapping[str, PathProtection]
    ) -> dict[str, PathProtection]:
        """Return the missing targets of ``links`` below the root, with the protection of the link."""
        top = place.root.rstrip("/") + "/"
        ends = ((os.path.realpath(path), why) for path, why in links.items())
        return {end: why for end, why in ends if end.startswith(top) and not os.path.lexists(end)}

    @staticmethod
    def _open_closed_folders(place: GuardedFolder, before: _FolderState) -> None:
        """Look also into folders that the program has closed."""
        place.refresh()
        for _ in range(_MAX_OPENING_ROUNDS):
            shut = [path for path in place.tree.list_unreadable_folders() if path not in before.closed]
            if not [path for path in shut if grant_folder_access_to_owner(place.root, path)]:
                return
            place.refresh()

    def _undo_faults(self, place: GuardedFolder, before: _FolderState, *, meanwhile: bool = False) -> None:
        tree = place.tree
        taken: list[str] = []
        for path, why, what in sorted(
            self._find_faults(place, before, meanwhile=meanwhile), key=lambda found: found[0].count("/")
        ):
            # Its folder is in the quarantine already, and it with it.
            if any(path == done or path.startswith(done + "/") for done in taken):
                continue
            taken.append(path)
            self._quarantine_path(tree, path, why, what, before)
        for path, target in before.links.items():
            if _read_link(path) != target:
                self._restore_link(tree.root, path, target)
        # A command that the user planned before the program ran may stay.
        known = {step for steps in before.rebase_commands.values() for step in steps}
        for path, steps in vcs.find_rebase_exec_steps(tree).items():
            if planted := [step for step in steps if step not in known]:
                self._remove_planted_commands(tree, path, planted, known)

    def _find_faults(
        self, place: GuardedFolder, before: _FolderState, *, meanwhile: bool
    ) -> Iterator[tuple[str, PathProtection | None, str]]:
        """Yield ``(path, protection, problem)`` for everything that may not stay."""
        now = place.tree.get_protected_entries()
        yield from self._find_faults_by_name(place, before, now)
        for path, kept in before.configs.items():
            if path not in now and (problem := vcs.explain_lost_config_restoration(place.tree, path, kept)) is not None:
                yield path, before.entries[path].why, problem
        yield from _find_faults_at_targets(place, before)
        for path in () if meanwhile else place.tree.list_unreadable_folders():
            if path not in before.closed and os.path.lexists(path):
                yield path, None, _UNREADABLE_REASON
        if self._denials is not None:
            yield from _find_faults_by_denials(place, before, self._denials, hides=not meanwhile)

    def _find_faults_by_name(
        self, place: GuardedFolder, before: _FolderState, now: Mapping[str, ProtectedEntry]
    ) -> Iterator[tuple[str, PathProtection | None, str]]:
        """Yield the faults of protected names, and note what rules or a clone allow."""
        tree = place.tree
        fresh = [
            path
            for path in tree.list_git_directories()
            if path not in before.repositories and path not in before.folders
        ]
        moved = self._identify_mounted(place)
        judged = self._vcs or running_programs.may_change_git_config(tree.root)
        cloned = self._find_cloned_work_trees(fresh, before)
        for path, entry in now.items():
            is_new = path not in before.entries
            # The user renamed a folder while the program ran. Moving the file away would undo the user's work.
            if is_new and _has_moved_with_mount(place, path, entry, moved):
                continue
            if self._is_allowed_by_rule_or_clone(path, entry, cloned):
                if is_new:
                    self._note_made(tree, path, entry, cloned)
                continue
            if _is_name_unchanged(path, entry, before):
                continue
            by_keys = judged or path in running_programs.vouched
            problem = (
                vcs.explain_protected_entry_fault(tree, entry, before.configs.get(path)) if by_keys else "it is new"
            )
            if problem is not None:
                yield _find_path_to_move(path, entry, fresh, by_keys=by_keys), entry.why, problem

    def _is_allowed_by_rule_or_clone(self, path: str, entry: ProtectedEntry, cloned: Collection[str]) -> bool:
        """Return whether a rule opens a protected name, or the file is in a cloned work tree."""
        return protected_mounts.is_writable_by_programs(entry, self._denials) or (
            entry.why.requires_approval and protected_mounts.is_within_any_folder(path, cloned)
        )

    def _note_made(self, tree: FolderTree, path: str, entry: ProtectedEntry, cloned: Collection[str]) -> None:
        if not entry.why.applies_to_programs and not protected_mounts.is_within_any_folder(path, cloned):
            self._kept_paths[escape_terminal_controls(path[len(tree.root.rstrip("/")) + 1 :])] = None

    def _restore_lost_mounted_file(
        self, place: GuardedFolder, path: str, original: OriginalPathState, before: _FolderState
    ) -> None:
        """Restore a file that was mounted over if the mount did not stay on it to the end.

        The same file with other content is the user's change, since the mount was on it all the time. A git
        configuration that differs in harmless keys only may stay too. Everything else can be the program's: it is moved
        away, never deleted.
        """
        tree = place.tree
        fate = place.originals.classify_file_change(path, original)
        entry = before.entries.get(path)
        if _may_mounted_content_stay(tree, entry, original, fate):
            return
        shown = escape_terminal_controls(path[len(tree.root.rstrip("/")) + 1 :])
        if original.snapshot is None and (fate == "gone" or entry is None):
            what = "is gone" if fate == "gone" else "was replaced"
            self._add_finding(f"{shown} {what} while the program ran, and cannot be restored")
            return
        try:
            became = self._restore_and_describe(tree.root, path, original, fate)
        except FileNotFoundError:
            return  # its folder is missing too
        except OSError as error:
            raise_if_resource_shortage(error, path)  # the next look retries
            became = f"could not be restored ({error.strerror}) and the user must check it"
        self._add_finding(f"{shown} {became}, because {_CHANGED_BELOW_MOUNT[tree.can_respelling_bypass_mounts]}")

    def _restore_and_describe(self, root: str, path: str, original: OriginalPathState, fate: FileFate) -> str:
        """Restore a path and return the result as a message says it."""
        moved = ""
        # The file may also be the user's, so it is kept, even if it probably came from the program.
        if fate == "replaced" and (kept := self._quarantine.move_into_quarantine(root, path)) is not None:
            moved = f"; the file in its place was moved to {kept}" if kept else "; the file in its place was removed"
        if original.snapshot is None:
            return f"has changed{moved}"
        restore_file(root, path, original.snapshot)
        return f"was restored{moved}"

    def _identify_mounted(self, place: GuardedFolder) -> frozenset[object]:
        """Return the identities of the mounted-over files, to recognise them under another path.

        A program can neither move such a file nor link it.
        """
        mounted = next(
            (mine for other, mine in zip(self._places, self._mounted, strict=True) if other is place), _NO_ORIGINALS
        )
        return frozenset(
            (original.identity[:3], original.birth_ns)
            for original in mounted.values()
            if original.birth_ns is not None and (original.folder or original.links == 1)
        )

    def _find_cloned_work_trees(self, fresh: Sequence[str], before: _FolderState) -> frozenset[str]:
        """Return the work trees that are new together with their repository: a clone includes their files."""
        if not self._vcs:
            return frozenset()
        trees = (path.rpartition("/")[0] for path in fresh if normalise_file_name(path.rpartition("/")[2]) == GIT)
        # A work tree that existed before is the user's. A repository that appears in it was not cloned.
        return frozenset(tree for tree in trees if tree not in before.folders)

    def _quarantine_path(
        self, tree: FolderTree, path: str, why: PathProtection | None, what: str, before: _FolderState
    ) -> None:
        shown = escape_terminal_controls(path[len(tree.root.rstrip("/")) + 1 :])
        is_repository = path not in before.configs and path in tree.list_git_directories()
        try:
            kept = self._quarantine.move_into_quarantine(tree.root, path)
            became = "is gone again" if kept is None else f"was moved to {kept}" if kept else "was removed"
            if (original := before.configs.get(path)) is not None:
                restore_file(tree.root, path, original)
                became = "was restored"
        except OSError as error:
            raise_if_resource_shortage(error, path)  # the next look retries
            became = f"could not be moved away ({error.strerror}) and the user must remove it"
        if why is None:
            self._add_finding(f"{shown} {became}, because {what}")
        # The message names the rule that would allow it. For the other kinds, no rule helps.
        elif why.requires_approval:
            rule = f"the rule 'allow fs.write {shown}' would allow it"
            self._add_finding(f"{shown} {became}, because it {why.description}; {rule}", asks=True)
        elif is_repository:
            detail = f" ({what})" if self._vcs else ""
            self._add_finding(
                f"{shown} is a new repository with its own configuration{detail} and {became}; only the user, or git.init "
                "and git.clone with the capability vcs.config, can create a repository here"
            )
        else:
            self._add_finding(f"{shown} {became}, because {_describe_reason(why, what)}")

    def _remove_planted_commands(
        self, tree: FolderTree, path: str, planted: Sequence[bytes], known: Collection[bytes]
    ) -> None:
        """Remove the steps that run a command from a rebase that has begun."""
        shown = escape_terminal_controls(path[len(tree.root.rstrip("/")) + 1 :])
        what = escape_terminal_controls(", ".join(step.decode("utf-8", "replace")[:100] for step in planted[:3]))
        try:
            rest = vcs.remove_rebase_exec_steps(tree, path, known)
            # A file that cannot be parsed could still be run by git, so it does not stay.
            if rest is None:
                self._quarantine.move_into_quarantine(tree.root, path)
            else:
                restore_file(tree.root, path, rest)
        except OSError as error:
            raise_if_resource_shortage(error, path)  # the next look retries
            self._add_finding(
                f"{shown} would run {what}, could not be changed ({error.strerror}), and the user must check it"
            )
        else:
            self._add_finding(
                f"{shown} would run {what} when the user continues the git operation, so this command was removed"
            )

    def _restore_link(self, root: str, path: str, target: str) -> None:
        """Restore a protected link that was changed or removed."""
        shown = escape_terminal_controls(path[len(root.rstrip("/")) + 1 :])
        try:
            with contextlib.suppress(FileNotFoundError):
                self._quarantine.move_into_quarantine(root, path)
            if (parent := open_parent(root, path)) is None:
                return
            try:
                os.symlink(target, path.rpartition("/")[2], dir_fd=parent)
            finally:
                os.close(parent)
        except OSError as error:
            raise_if_resource_shortage(error, path)  # the next look retries
            self._add_finding(f"{shown} was a link and could not be restored ({error.strerror})")
        else:
            self._add_finding(f"{shown} is a protected link that was changed, and was restored")


def _has_moved_with_mount(place: GuardedFolder, path: str, entry: ProtectedEntry, mounted: Collection[object]) -> bool:
    """Return whether another process renamed a folder around a path, and the mount moved with it."""
    return not entry.link and bool(mounted) and place.originals.identify(path) in mounted


def _is_name_unchanged(path: str, entry: ProtectedEntry, before: _FolderState) -> bool:
    """Return whether a protected name existed before and is unchanged, as far as the names show."""
    if (prior := before.entries.get(path)) is None or prior.link != entry.link:
        return False
    if entry.link:
        return _read_link(path) == before.links.get(path)
    return path not in before.configs  # it was mounted over: _check_mounted compares its content


def _find_path_to_move(path: str, entry: ProtectedEntry, fresh: Sequence[str], *, by_keys: bool) -> str:
    """Return the path to move away: the outermost new repository around ``path``, else ``path`` itself."""
    if entry.why.kind == "hook" and by_keys:
        return path  # other files than samples are moved away, and the repository stays
    return min((one for one in fresh if path.startswith(one + "/")), key=len, default=path)


def _find_faults_at_targets(
    place: GuardedFolder, before: _FolderState
) -> Iterator[tuple[str, PathProtection | None, str]]:
    """Yield the faults in new files that git's settings or a protected link lead to."""
    pointed = vcs.find_paths_named_by_git(place.tree) if before.missing else vcs.GitNamedPaths()
    for path in before.missing:
        made = _find_outermost_link(place, path)
        if os.path.lexists(path) and (made in pointed.targets or made in pointed.links):
            yield made, PathProtection("hook"), "a repository's configuration names it"
    for path, why in before.dangling.items():
        if os.path.lexists(path):
            yield _find_outermost_link(place, path), why, "a protected link leads to it"


def _find_faults_by_denials(
    place: GuardedFolder, before: _FolderState, denials: PathDenials, *, hides: bool
) -> Iterator[tuple[str, PathProtection | None, str]]:
    """Yield the faults in paths that rules deny.

    :param hides: whether to check hidden paths too
    """
    hidden = place.find_paths_to_mask(denials) if hides else ()
    # With more hidden names than mounts, the next program could read some of them.
    if len(hidden) > protected_mounts.MAX_MOUNTS:
        prior_hidden = frozenset(before.hidden)
        for path in hidden:
            if path not in prior_hidden:
                yield path, None, _TOO_MANY_HIDDEN_REASON
    for path in place.find_rule_read_only_paths(denials):
        if path not in before.fixed and not protected_mounts.is_within_any_folder(path, before.fixed):
            yield path, None, "a rule denies writing it"


def _may_mounted_content_stay(
    tree: FolderTree, entry: ProtectedEntry | None, original: OriginalPathState, fate: FileFate
) -> bool:
    """Return whether the current content of a mounted-over path may stay."""
    if fate in ("same", "edited"):
        return True
    if fate == "gone":
        return original.folder  # a program cannot remove a mount, and a missing file is harmless
    if entry is None or entry.why.kind != "vcs" or original.folder:
        return False
    return vcs.explain_protected_entry_fault(tree, entry, original.snapshot) is None


def _find_outermost_link(place: GuardedFolder, path: str) -> str:
    """Return the first link on the way to a path; the path itself if there is none."""
    return next(iter(protected_mounts.find_links_on_path(place.root, path)), path)


def _describe_reason(why: PathProtection, what: str) -> str:
    return f"it {why.description}" + ("" if what == "it is new" else f", and {what}")


def _read_link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
