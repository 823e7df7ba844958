"""The true spelling of a path, for file systems on which several spellings name one file.

Some file systems ignore letter case in names (APFS, NTFS, vfat, a folder that macOS or Windows shares), and some the normal
form of Unicode text. vfat has a short name for each long one. A path that is compared as text is not compared as a file there.
So this module spells a path as the folders on its way list their names. An experiment shows whether a folder folds names:
the name of one of its entries in another case finds the entry. The answer is kept with the identity of the folder.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from handrail.contract.errors import ToolError
from handrail.contract.protected.path_protection import normalise_file_name
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.neutralisation import escape_terminal_controls

_MOST_FOLDERS = 65_536
_EXACT_TYPES = frozenset(
    ("btrfs", "devtmpfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "proc", "ramfs", "tmpfs", "xfs")
)
"""File systems that fold names only if the operator asked for it. A folder there without any entry to try counts as exact."""
_ONE_ENTRY_TYPES = frozenset(("exfat", "ext4", "f2fs", "hfs", "hfsplus", "msdos", "ntfs3", "tmpfs", "vfat", "xfs"))
"""File systems that give all spellings of a name one entry in the kernel, so that a mount is over all of them.

On others, such as FUSE, 9p and virtiofs, a mount is over one spelling, and another spelling reaches the file below it.
"""

_OCTAL = compile_regex_lazily(rb"\\([0-7]{3})")
"""A character of a name in the list of mounts, such as a blank."""

_exact: dict[str, tuple[int, int]] = {}
"""The folders that distinguish names by case, as each folder around them does, with their device and inode."""
_folding: dict[str, tuple[int, int]] = {}
_keeps_times: dict[int, bool] = {}
"""Whether folders change their times with their entries, by device."""


class NameFoldingPath(NamedTuple):
    """A path with at least one folder on its way that folds names.

    :param path: as the folders list it; a tail that does not exist yet stays as written
    :param key: equal for all spellings of the path: names in folding folders are folded, and others are not
    :param exact_names: the number of names up to the last one in an exact folder
    """

    path: str
    key: str
    exact_names: int


def resolve_name_folding_path(path: str, *, is_listed: bool = False) -> NameFoldingPath | None:
    """Return the spelling of an absolute path without links; None if each folder on its way is exact.

    :param is_listed: whether the path has the listed names already, as in a walk through folders
    :raises ToolError: ``denied`` if a name opens an entry that its folder does not list
    """
    folder = path.rpartition("/")[0] or "/"
    known = _exact.get(folder)
    if known is not None and path.isascii() and (is_listed or _identify(folder) == known):
        return None
    if path == "/":
        return None
    spelled = key = ""
    exists, folds, any_folds, exact_names = True, False, False, 0
    for count, written in enumerate(path.split("/")[1:], 1):
        name: str | None = written
        identity = _identify(spelled or "/") if exists else None
        exists = identity is not None  # otherwise nothing below it exists, and each name is as the folder around it
        if identity is not None:
            folds = _folds_name(spelled or "/", identity, written, inherited=folds, keep_exact=not any_folds)
            any_folds = any_folds or folds
        if exists and not is_listed:
            name = _find_listed_name(spelled, written) if folds else _find_exact_name(spelled, written)
            exists = name is not None
        name = name or written
        spelled, key = f"{spelled}/{name}", f"{key}/{normalise_file_name(name) if folds else name}"
        exact_names = exact_names if folds else count
    return NameFoldingPath(spelled, key, exact_names) if any_folds else None


def is_exact_on_device(path: str, device: int) -> bool:
    """Return whether a path is surely spelled as its folders list it. This does not ask the file system.

    :param device: the number of the device that the path is on now
    """
    known = _exact.get(path.rpartition("/")[0])
    return known is not None and known[0] == device and path.isascii()


def canonicalize_path_spelling(path: str) -> str:
    """Return an absolute path without links, as the folders on its way list it."""
    return path if (found := resolve_name_folding_path(path)) is None else found.path


def make_spelling_independent_key(path: str) -> str:
    """Return a text that is equal for all spellings of a path, which has the listed names."""
    return path if (found := resolve_name_folding_path(path, is_listed=True)) is None else found.key


def is_name_folding_folder(folder: str) -> bool:
    """Return whether an existing folder, or the one that it would be made in, takes several spellings for one name."""
    return resolve_name_folding_path(f"{folder.rstrip('/')}/-", is_listed=True) is not None


def forget_folder(folder: str) -> None:
    """Forget what is known about a folder, because another one is in its place."""
    _exact.pop(folder, None)
    _folding.pop(folder, None)


def can_respelling_bypass_mounts(folder: str) -> bool:
    """Return whether another spelling of a path in a folder reaches the file below a mount over the path."""
    return is_name_folding_folder(folder) and _file_system_type(folder) not in _ONE_ENTRY_TYPES


def keeps_folder_times(folder: str, device: int) -> bool:
    """Return whether the time of a folder surely changes with its entries. On FUSE that depends on the server.

    :param device: the number of the device that the folder is on
    """
    answer = _keeps_times.get(device)
    if answer is None:
        answer = _keeps_times[device] = _file_system_type(folder).partition(".")[0] != "fuse"
    return answer


def _identify(folder: str) -> tuple[int, int] | None:
    try:
        found = os.stat(folder)  # noqa: PTH116 - for each path
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _folds_name(folder: str, identity: tuple[int, int], name: str, *, inherited: bool, keep_exact: bool) -> bool:
    """Return whether a folder takes other spellings of a name for it.

    :param identity: the device and inode of the folder
    :param inherited: the answer of the folder around it
    :param keep_exact: whether to keep the answer of an exact folder, because each folder around it is exact, too
    """
    if _folding.get(folder) == identity:
        return True
    if _exact.get(folder) != identity:
        if (answer := _ignores_case(folder, name)) is None:  # nothing in it shows the answer, so it is not kept
            around = _identify(folder.rpartition("/")[0] or "/")
            if folder != "/" and around is not None and around[0] == identity[0]:
                return inherited
            return _file_system_type(folder) not in _EXACT_TYPES
        forget_folder(folder)
        if answer or keep_exact:
            kept = _folding if answer else _exact
            if len(kept) >= _MOST_FOLDERS:
                kept.clear()
            kept[folder] = identity
        if answer:
            return True
    return not name.isascii() and _ignores_normal_form(folder, name)


def _ignores_case(folder: str, name: str) -> bool | None:
    """Return whether a folder finds names in another case; None if no entry of it shows that."""
    if any(_is_only_spelling(folder, name, other) for other in _other_case(name)):
        return False
    for one, other in _list_pairs(folder, _other_case):
        if _is_only_spelling(folder, one, other):
            return False
        if os.path.lexists(f"{folder}/{one}") and os.path.lexists(f"{folder}/{other}"):
            return True
    return None


def _is_only_spelling(folder: str, name: str, other: str) -> bool:
    """Return whether a name opens an entry and another spelling does not.

    The name is tried before and after, so that an entry that is removed meanwhile shows nothing.
    """
    path = f"{folder}/{name}"
    return os.path.lexists(path) and not os.path.lexists(f"{folder}/{other}") and os.path.lexists(path)


def _ignores_normal_form(folder: str, name: str) -> bool:
    """Return whether a folder that distinguishes case finds a name in another Unicode normal form."""
    if not (others := _other_forms(name)):
        return False
    if all(_is_only_spelling(folder, name, other) for other in others):
        return False
    for one, other in _list_pairs(folder, _other_forms):
        if _is_only_spelling(folder, one, other):
            return False
        if os.path.lexists(f"{folder}/{one}") and os.path.lexists(f"{folder}/{other}"):
            return True
    return _file_system_type(folder) not in _EXACT_TYPES


def _list_pairs(folder: str, others: Callable[[str], Iterable[str]]) -> Iterator[tuple[str, str]]:
    """Yield the entries of a folder, each with another spelling that the folder does not list."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - only names
    except OSError:
        return
    listed = frozenset(names)
    for name in names:
        for other in others(name):
            if other not in listed:
                yield name, other


def _other_case(name: str) -> tuple[str, ...]:
    """Return a name in the other case, unless case changes more in it than its letters."""
    other = name.swapcase()
    return (other,) if other != name and other.swapcase() == name and len(other) == len(name) else ()


def _other_forms(name: str) -> tuple[str, ...]:
    """Return a name in its other Unicode normal forms."""
    if name.isascii():
        return ()
    return tuple({unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)} - {name})


def _find_exact_name(folder: str, name: str) -> str | None:
    return name if os.path.lexists(f"{folder}/{name}") else None


def _find_listed_name(folder: str, name: str) -> str | None:
    """Return the name by which a folding folder lists an entry; None if it has no such entry.

    Only an entry with a short name is found by its inode number: not every file system has one number for all spellings.

    :raises ToolError: ``denied`` if the name opens an entry, and no listed name is known to be that entry
    """
    path = f"{folder}/{name}"
    try:
        wanted = os.lstat(path)
        names = os.listdir(folder or "/")  # noqa: PTH208 - only names
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unlisted_error(path) from error
    if name in names:
        return name
    key = normalise_file_name(name)
    alike = [one for one in names if normalise_file_name(one) == key]
    if len(alike) != 1:
        alike = [one for one in alike or names if _is_entry(f"{folder}/{one}", wanted)]
    if len(alike) == 1:
        return alike[0]
    if not os.path.lexists(path):  # it was removed meanwhile
        return None
    raise _unlisted_error(path)


def _is_entry(path: str, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.lstat(path), wanted)
    except OSError:
        return False


def _unlisted_error(path: str) -> ToolError:
    folder, _, name = path.rpartition("/")
    return ToolError(
        f"`{escape_terminal_controls(path)}` was not opened: {escape_terminal_controls(folder or '/')} is on a file "
        "system that accepts several spellings of one name, and it lists no entry that is certainly "
        f"`{escape_terminal_controls(name)}`. Use the name that a listing of the folder shows.",
        kind="denied",
    )


def _file_system_type(folder: str) -> str:
    """Return the type of the file system that a folder is on, as the system's mounts say; empty if it is unknown."""
    found = deepest = ""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields, _, rest = line.partition(b" - ")
        place = os.fsdecode(_OCTAL.sub(lambda escape: bytes((int(escape[1], 8),)), fields.split(b" ")[4]))
        within = folder == place or folder.startswith(f"{place.rstrip('/')}/")
        if within and len(place) >= len(deepest):  # the last of several mounts at one place is the visible one
            found, deepest = rest.split(b" ")[0].decode(), place
    return found
