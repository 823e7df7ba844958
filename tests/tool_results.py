"""The keys in the data of each shipped tool, with their meanings, for :mod:`tests.tool_reference`.

One line a key. A line that begins with ``?`` is a key that only some calls return.
"""

from __future__ import annotations

from collections.abc import Mapping

_DIFF = """\
diff: Unified diff of the change
lines_added: Number of added lines
lines_removed: Number of removed lines
?omitted_diff_lines: Number of lines of the diff that were omitted because it is long"""
_FILE = f"""\
path: Path of the file
size: Size of the new file in bytes
{_DIFF}
?encoding: Encoding of the file, if it is not UTF-8 without a byte order mark
?line_ends: `CRLF`, `CR` or `mixed (…)`, or what they were changed from and to; absent if all are LF
?escapes: What was written for escapes such as `⟦<⟧` whose meaning was not certain
?invalid_bytes: Text that says that U+FFFD replaced bytes that are not text"""
_ENTRY = """\
path: {}
kind: `file` or `directory`
entries: Number of files, folders and links, with everything in a folder
size: Bytes of all files"""
_RUN = """\
exit_code: Exit code of the program, or null if a signal ended it
output: Output of the program, stdout and stderr together
?signal: Number of the signal that ended the program
?limit: Resource limit that ended the program
?dropped_bytes: Number of bytes in the middle of the output that were not kept
?notes: Hints, such as files that were restored or hosts that are not reachable"""
_GIT = """\
?skipped_filters: Filters that the repository configures and that did not run"""
_HEAD = """\
branch: Current branch, or null
commit: Hash of the current commit
?detached: true if the repository is not on a branch"""
_PATCH = f"""\
files: Changed files, each with `path`, `change`, `added` and `deleted`, or `binary`
added: Number of added lines in all files
deleted: Number of deleted lines in all files
?files_not_listed: Number of further files
?patch: Changes as a patch; absent with `counts_only`
?redacted_paths: Files that rules hide, with the reason
{_GIT}"""
_TRIGGER = """\
trigger_id: Name of the trigger
kind: `timer`, `schedule` or `channel`
prompt: Message that the agent receives"""
_TASK = """\
task: Task with all of its fields. `version` counts its changes, `open_blockers` are the blockers that are neither completed nor cancelled, `blocks` are the tasks that wait for it"""
_UNLOADED = """\
?unloaded: Tools that were unloaded to make room, with the reason
?not_searched: Sources that have not listed their tools yet"""
_STOPPED = """\
?note: Remark, such as that the job had ended before"""
_CONFLICTS = f"""\
{_HEAD}
?subject: Subject of the current commit
?author: Author of the current commit"""

RESULTS: Mapping[str, str] = {
    "read": """\
path: Path of the file
?text: Lines of the file, or a range of bytes that is text
?first_line: Number of the first line in `text`; absent with `unit: bytes`
?last_line: Number of the last line in `text`; absent with `unit: bytes`
?next: Offset to continue from, or null at the end
size: Size of the file in bytes
?total_lines: Number of lines of the file, if the call counted them
?truncated_lines: Numbers of lines that are longer than 2,000 characters, at most 100
?encoding: Encoding of the file, if it is not UTF-8 without a byte order mark
?start: First byte; only with `unit: bytes`
?end: Byte after the last one; only with `unit: bytes`
?base64: Bytes that are not text; only with `unit: bytes`
?image: Reference to the image, if the file is one: `artifact`, `media_type` and `bytes`""",
    "write": f"created: true if the file did not exist before\n{_FILE}",
    "edit": f"replacements: Number of replaced places\n{_FILE}",
    "file.patch": _FILE,
    "glob": """\
paths: Paths of the matching files, sorted
?has_more: Text that says that the list is incomplete and how to narrow it
?skipped: Number of matches that rules hide""",
    "grep": """\
matches: Matching lines, each with `path`, `line` and `text`
?encodings: Encodings of the files with a match that are not in UTF-8, by path
?not_searched: Number of files in an encoding that grep does not know
?has_more: Text that says that the list is incomplete and how to narrow it
?skipped: Number of files that rules hide""",
    "bash": _RUN,
    "python": _RUN,
    "todo": "todos: Complete task list, each item with `id`, `content` and `status`",
    "question": "answers: One list of answers for each question",
    "plan": """\
entered: true if the session is in plan mode now
?mode: `plan`, if it was entered
?reason: Words of the user
next: What to do now""",
    "plan_exit": """\
approved: true if the user approved the plan
mode: Mode of the session after the answer
?reason: Words of the user
next: What to do now""",
    "task": """\
agent: Id of the agent
session_id: Session of the sub-agent
text: Final message of the sub-agent
turns: Number of turns that the sub-agent took
calls: Number of calls that the sub-agent made
?status: How the run ended, if it did not finish
?awaiting_approval: Approval requests of the sub-agent that have no answer yet
?note: Remark for the model""",
    "skill": """\
name: Name of the skill
from: Origin of the skill, such as `shipped` or `workspace`
content: Instructions of the skill
?note: Remark, such as that the skill is already loaded
?files: Further files of the skill""",
    "browse_tools": "categories: Categories of tools that are not loaded, each with its name, description and number of tools",
    "load_tools": f"""\
loaded: Category or tool that was requested
tools_added: Ids of the tools that are newly loaded
message: Summary for the model
{_UNLOADED}""",
    "find_tools": f"""\
tools: Matching tools, best first, each with `id`, `description` and `confidence`, and `low_confidence` if the match is weak
message: Summary for the model
?no_match: Queries without a match, or true if the only query has none
?nearest_unloaded: Tools that come closest and were not loaded
?not_loaded: Queries whose tools did not fit into the active set
{_UNLOADED}""",
    "tool_search": f"""\
tools: Matching tools of MCP servers and extensions
?no_match: true if no tool matches
?message: Summary for the model
{_UNLOADED}""",
    "info": """\
id: Id of the tool
name: Wire name of the tool
category: Category of the tool
description: Description for models
parameters: JSON schema of the arguments
?documentation: Long text of the tool
?guidance: Advice for the system prompt
?example: Example call""",
    "multi_edit": f"""\
replacements: Number of replaced places in all edits
{_FILE}
?failed: Edits that failed, each with its number and the reason
?not_applied: Number of edits after the first failed one; only with `mode: partial`""",
    "apply_patch": """\
files: Files of the patch, each with `path`, `action`, `lines_added` and `lines_removed`, and if they apply `from`, `matched`, `already_applied` and `already_applied_hunks`
?already_applied: true if the files already have the whole change; `files` names single files and hunks
diff: Unified diff of all files
lines_added: Number of added lines
lines_removed: Number of removed lines
?omitted_diff_lines: Number of lines of the diff that are not shown""",
    "file.move": _ENTRY.format("New path"),
    "file.delete": _ENTRY.format("Path that was deleted"),
    "tree": """\
path: Folder that was listed
files: Number of files below the folder
tree: Indented tree, one entry a line
?has_more: Text that says that the tree is incomplete and how to narrow it
?skipped: Number of entries that rules hide""",
    "lsp": """\
?locations: Places for definition and references, each with `path`, `line`, `column` and `text`; `text` is absent outside the \
workspace
?symbols: Symbols, each with `name`, `kind`, `container` and its place
?diagnostics: Problems, each with `severity`, `message`, `code` and its place
?edits: Lines that a rename would change, each with its place and `new_text`
?other_changes: Files that a rename would create, rename or delete
?hover: Type and documentation of the symbol
?path: File of the symbol, for hover
?line: Line of the symbol, for hover
?column: Column of the symbol, for hover
?text: Source line of the symbol, for hover
?total: Number of all results, of which the first 200 are listed
?files: Number of results by file, if not all are listed
?hidden: Number of results that are left out because a rule hides their files
?incomplete: true if results may be missing
?stale: true if the diagnostics may be for older content
?why: Reason for `incomplete` or `stale`
servers: Names of the servers that answered""",
    "repo_overview": """\
path: Folder that is described
files: Number of files below the folder
languages: Languages by lines, each with `name`, `files` and `lines`
entry_points: What starts a program of the repository, as its manifests say
test_commands: Commands for the tests, as its manifests say
tree: Indented tree of folders and files, as deep as fits
?matches: With `focus`: files, the best first, each with `path` and the `outline` of its definitions by line
?notes: Limits of the overview""",
    "json_read": """\
path: Path of the file
pointer: JSON Pointer of the value
type: JSON type of the value
value: Value
?encoding: Encoding of the file, if it is not UTF-8 without a byte order mark""",
    "json_write": f"""\
pointer: JSON Pointer of the value
created: true if the file did not exist before
{_FILE}""",
    "scratchpad": """\
?key: Name of the note
?replaced: true if `set` replaced an older note
?value: Text of the note; only for `get`
?deleted: true after `delete`
?keys: Names of all notes; only for `list`
?cleared: Number of removed notes; only for `clear`""",
    "search_memory": """\
?hits: Matching passages, each with `id`, `kind`, `at` and `text`, and `tool` if it is a call
?found: Number of all matches, at most 1,000
?searched: Number of passages that were searched
?older_not_searched: true if older passages were not searched
?id: Passage that was read; only with `id`
?kind: Kind of the passage; only with `id`
?at: Time of the passage; only with `id`
?text: Text of the passage; only with `id`
?tool: Tool of the passage; only with `id`
?next: Offset to continue from, or null at the end; only with `id`""",
    "artifact.read": """\
ref: Reference of the artifact
media_type: Media type of the artifact
?text: Bytes as text, if they are text
?base64: Bytes in base64, if they are not text
?start: First byte
?end: Byte after the last one
?next: Offset to continue from, or null at the end
size: Size of the artifact in bytes
?image: Reference to the image, if the artifact is one""",
    "memory.query": """\
hits: Matches, the best or latest first, each with `id` and `text`, and if they apply `at`, `kind`, `key`, `tags` and `unconfirmed`
found: Number of all matches""",
    "memory.upsert": """\
id: ID of the fact
stored: false if a stored fact says the same and was kept instead
?merged_with: Text of the stored fact that was kept
?unconfirmed: Reason why the fact is unconfirmed""",
    "memory.compact": """\
?removed_messages: Number of messages that the model no longer receives
?removed_tokens: Approximate number of tokens that this saves
?kept_messages: Number of messages that remain
?note: Remark for the model
?replaced_facts: Number of facts that the latest one with the same key replaced
?compaction: Number of this compaction, if facts were replaced""",
    "create_task": _TASK,
    "edit_task": _TASK,
    "get_task": _TASK,
    "list_tasks": """\
tasks: Tasks, each with `id`, `title`, `status`, `owner` and `open_blockers`
total: Number of tasks that match
next: Number of tasks to skip in the next call, or null at the end""",
    "send_message": """\
channel: Name of the channel
sent: true
unread: Number of messages on the channel that have no reader yet""",
    "wait_channel": """\
channel: Name of the channel
message: Text of the message, or null if none arrived in time
?sender: Agent that sent the message
?data: Structured data of the message
?missed_messages: Number of messages that were dropped before this one""",
    "add_timer": f"{_TRIGGER}\ninterval: Interval in seconds\nonce: true if the timer fires only once\nnext: Time when it fires next",
    "add_schedule": f"{_TRIGGER}\ncron: Schedule as a cron expression\nnext: Time when it fires next",
    "watch_channel": f"{_TRIGGER}\nchannel: Name of the channel\n?filter_sender: Agent whose messages count",
    "list_triggers": "triggers: Triggers of the session, each as the call that created it returned it",
    "remove_trigger": """\
trigger_id: Name of the trigger
removed: true
fired: Number of times that the trigger fired""",
    "jobs": """\
jobs: Jobs of the session, each with `job_id`, `tool`, `state`, `about` and `output_bytes`
?omitted_older_jobs: Number of older jobs that are not listed""",
    "read_job": """\
job_id: Id of the job
state: State of the job
text: Output of the job
cursor: Position to continue from, in bytes
has_more: true if the job can have further output
?first_line: Number of the first line; only with `offset` or `lines`
?dropped_bytes: Number of bytes of output that were not kept""",
    "wait": """\
job_id: Id of the job
state: State of the job
?result: Result of the job, if it has ended
?note: Remark, if the job has not ended""",
    "stop_task": f"job_id: Id of the job\nstate: State of the job\n{_STOPPED}",
    "terminal.start": "job_id: Id of the terminal, which is a job\nstate: State of the job\n?note: Locks that the terminal holds or does not hold",
    "terminal.send": """\
id: Id of the terminal
sent_bytes: Number of bytes that the terminal took
?note: Remark, if the terminal did not take all of them""",
    "terminal.read": """\
id: Id of the terminal
text: Output of the terminal
cursor: Position to continue from, in bytes
state: State of the terminal
has_more: true if there is further output now
?dropped_bytes: Number of bytes of output that were not kept
?notes: Why the sandbox refused something that the output names, if it did""",
    "terminal.resize": "id: Id of the terminal\ncolumns: New width in columns\nrows: New height in rows",
    "terminal.stop": f"id: Id of the terminal\nstate: State of the terminal\n{_STOPPED}",
    "tool.step": """\
state_id: Id of the tool session
?step: Result of the step
?done: true after the last step""",
    "tool.close": "state_id: Id of the tool session\n?closed: true\n?note: Remark, such as that the tool session had ended before",
    "git.status": f"""\
repository: Folder of the repository
{_HEAD}
?upstream: Upstream branch
?upstream_deleted: true if the upstream branch no longer exists
?ahead: Number of commits that the upstream branch does not have
?behind: Number of commits that only the upstream branch has
?state: Operation in progress, such as `merging`
?stashes: Number of stashes
clean: true if there are no changes
staged: Staged changes, each with `path` and `change`, and `from` after a rename
unstaged: Changes that are not staged
untracked: Untracked files
conflicts: Files with conflicts
?staged_not_listed: Number of further staged changes
?unstaged_not_listed: Number of further changes
?untracked_not_listed: Number of further untracked files
?conflicts_not_listed: Number of further conflicts
?redacted_paths: Files that rules hide, with the reason
{_GIT}""",
    "git.log": """\
commits: Commits, newest first, each with `commit`, `parents`, `author`, `date`, `subject` and, if present, `body` and `refs`
?next_skip: Value of `skip` for the next page""",
    "git.diff": _PATCH,
    "git.show": f"""\
?commit: Hash of the commit
?parents: Hashes of its parents
?author: Author of the commit
?date: Date of the commit
?subject: First line of the message
?body: Rest of the message
?committer: Person who committed, if not the author
?committed: Time of the commit, if it differs from `date`
?refs: Branches and tags that point to the commit
?compared_to: Parent that the changes of a merge are compared to
{_PATCH.replace("files:", "?files:").replace("added:", "?added:", 1).replace("deleted:", "?deleted:", 1)}
?path: Path of the file; only with `file`
?ref: Commit that was asked for; only with `file`
?bytes: Size of the file; only with `file`
?content: Content of the file; only with `file`
?binary: true instead of `content` if the file is binary""",
    "git.blame": """\
path: Path of the file
commits: Commits that the lines come from, by hash
lines: Lines, each with `line`, `commit` and `text`
?next_first: Value of `first` for the next page""",
    "git.branches": """\
branches: Local branches, each with `branch`, `commit`, `date` and `subject`, and `upstream` and `compared` if it tracks one
?remote_branches: Branches of the remotes, as of the last fetch
remotes: Remotes with their addresses
?has_more: Text that says that the list is incomplete""",
    "git.add": f"""\
staged: All staged changes
?not_staged: Files that were not staged, with the reasons
?conflicts: Files that still have conflicts
{_GIT}""",
    "git.commit": f"""\
{_HEAD}
subject: Subject of the commit
author: Author of the commit
files: Files of the commit, each with `path` and `change`
?files_not_listed: Number of further files
?not_staged: Files that were not staged, with the reasons
{_GIT}""",
    "git.create_branch": "branch: Name of the branch\ncommit: Hash of the commit that it points to\n?upstream: Upstream branch",
    "git.checkout": f"{_CONFLICTS}\n?restored: Restored files; only with `paths`\n{_GIT}",
    "git.merge": f"""\
result: `merged`, `fast-forwarded`, `already up to date` or `aborted`
{_CONFLICTS}
?files: Changed files
{_GIT}""",
    "git.stash": """\
?stashes: Stashes, each with `index`, `commit`, `date` and `message`; only for `list`
?done: Operation that was performed
?index: Number of the stash
?commit: Hash of the stash
?date: Date of the stash
?message: Description of the stash
?files: Files of the stash; only for `show`
?added: Number of added lines; only for `show`
?deleted: Number of deleted lines; only for `show`
?patch: Changes as a patch; only for `show`""",
    "git.init": "repository: Folder of the repository\nbranch: Name of the first branch",
    "git.clone": """\
repository: Folder of the new repository
from: Address or folder that was cloned
branch: Branch that is checked out
commit: Hash of the current commit, or null if the repository is empty""",
    "git.push": """\
remote: Name of the remote
url: Address of the remote
branch: Branch that was pushed
result: `new branch`, `updated` or `already up to date`
commits: Range of the pushed commits""",
    "git.pr": """\
number: Number of the pull request
url: Address of its page
repository: Owner and name of the repository
title: Title of the pull request
base: Branch to merge into
head: Branch with the commits
draft: true if it is a draft
existing: true if it was open already, and no other was opened""",
    "web_search": """\
results: Results, each with `title`, `url` and `snippet`
provider: Provider that answered
?notes: Providers that failed before, with `fallback`""",
    "web_fetch": """\
url: URL of the page, after all redirects
status: Status of the response
?content_type: Type of the content, as the server states it
?redirects: URLs that redirected to it
?title: Title of the page
?text: Text of the page; not for an image
?links: Links in the text, each with `text` and `url`, at most 100
?image: The image, for a model that takes images
?notes: Limits of the text""",
    "http.post": """\
url: URL that answered
status: Status of the response
?content_type: Type of the answer, as the server states it
?redirects: URLs that redirected to it
?location: Target of a redirect that was not followed
?json: Answer, if it is JSON
?text: Answer, if it is not JSON
?notes: Limits of the answer""",
    "resource.list": "resources: Resources, in the form of MCP\nresourceTemplates: URI templates, in the form of MCP",
    "resource.read": "contents: Contents of the resource, in the form of MCP",
    "resource.subscribe": "subscribed: URI of the resource",
    "resource.unsubscribe": "unsubscribed: true if the session had subscribed to the resource",
    "prompt.list": "prompts: Prompts with their arguments, in the form of MCP",
    "prompt.get": "?description: Description of the prompt\nmessages: Messages of the prompt, in the form of MCP",
    "prompt.complete": "values: Suggested values\n?total: Number of all values\n?hasMore: true if there are further values",
}


def meanings(tool_id: str) -> dict[str, str]:
    """Return the meaning of each key."""
    pairs = (line.removeprefix("?").partition(": ") for line in RESULTS[tool_id].splitlines())
    return {key: meaning for key, _, meaning in pairs}


def always(tool_id: str) -> frozenset[str]:
    """Return the keys that every plain call returns."""
    return frozenset(line.partition(": ")[0] for line in RESULTS[tool_id].splitlines() if not line.startswith("?"))
