"""An MCP server over stdin and stdout with scripted misbehaviour: ``python scripted_mcp_program.py PLAN.json``.

It is a separate program and needs only Python. The plan lists its tools and its misbehaviour; see
:class:`tests.upstream.scripted_mcp_servers.StdioServerProgram`. A plan that changes on disk applies from the next message on.
"""

# pyright: basic
# ruff: noqa: UP031

import json
import os
import sys
import threading
import time

plan_path = sys.argv[1]
lock = threading.Lock()
wanted = {"level": "info"}
waiting = {}  # unanswered requests, and for requests to the client the request that gets the answer


def plan():
    with open(plan_path) as file:
        return json.load(file)


def put(message):
    with lock:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def answer(number, result):
    put({"jsonrpc": "2.0", "id": number, "result": result})


def text(number, said):
    answer(number, {"content": [{"type": "text", "text": said}]})


def write_marker_file(name, content=""):
    """Write a file for the test into the program's home folder, which its sandbox allows."""
    with open(os.path.join(os.environ["HOME"], name), "a") as file:
        file.write(content + "\n")


def write_file_when_signalled(sign, path):
    """Write a file when another one exists, so at a time that the test chooses, outside of a call."""
    while not os.path.exists(sign):
        time.sleep(0.01)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".part", "w") as file:
        file.write("defer")
    os.rename(path + ".part", path)


def fail(number, code, message):
    put({"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}})


def refuse(number, error):
    answer(number, {"isError": True, "content": [{"type": "text", "text": error.strerror}]})


def notify(method, **params):
    put({"jsonrpc": "2.0", "method": "notifications/" + method, **({"params": params} if params else {})})


def write(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(content)


def echo(number, args, meta):
    text(number, args.get("text", ""))


def pid(number, args, meta):
    text(number, str(os.getpid()))


def environment(number, args, meta):
    text(number, json.dumps(dict(os.environ)))


def look(number, args, meta):
    try:
        with open(args["path"]) as file:
            text(number, file.read())
    except OSError as error:
        refuse(number, error)


def put_file(number, args, meta):
    try:
        write(args["path"], "put")
        text(number, "put")
    except OSError as error:
        refuse(number, error)


def put_later(number, args, meta):
    threading.Thread(target=write_file_when_signalled, args=(args["sign"], args["path"]), daemon=True).start()
    text(number, "will")


def put_and_fail(number, args, meta):
    write(args["path"], "put")
    fail(number, -32000, "no luck")


def die(number, args, meta):
    os._exit(int(args.get("code", 7)))


def hang(number, args, meta):
    write_marker_file("hanging")
    waiting[number] = True  # never answered, unless it is cancelled


def huge(number, args, meta):
    size = int(args["bytes"])
    with lock:
        sys.stdout.write('{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"' % number)
        for _ in range(size // 65536):
            sys.stdout.write("x" * 65536)
        sys.stdout.write('"}]}}\n')
        sys.stdout.flush()


def garbage(number, args, meta):
    with lock:
        sys.stdout.write('{"jsonrpc": "2.0", "id": %d, "result": {{{\n' % number)
        sys.stdout.flush()


def flood(number, args, meta):
    line = "all of this goes to stderr\n" * 1000
    for _ in range(int(args.get("times", 100))):
        sys.stderr.write(line)
    sys.stderr.flush()
    text(number, "flooded")


def chatter(number, args, meta):
    for _ in range(int(args.get("times", 1000))):
        notify("tools/list_changed")
        notify("message", level="info", data="x")
    text(number, "said")


def steps(number, args, meta):
    for done in (1, 2):
        notify("progress", progressToken=meta.get("progressToken"), progress=done, total=2, message="step %d" % done)
    notify("message", level="warning", data={"n": 1}, logger="l")
    if wanted["level"] == "debug":
        notify("message", level="debug", data="fine")
    text(number, "stepped")


def ask(number, args, meta):
    put({"jsonrpc": "2.0", "id": "ask-%d" % number, "method": args["method"], "params": args["params"]})
    waiting["ask-%d" % number] = number


def answers_twice(number, args, meta):
    text(number, "once")
    text(number, "twice")
    text(number + 1000, "to nobody")


def slow_exit(number, args, meta):
    text(number, "bye")
    sys.stdout.flush()
    os._exit(0)


TOOLS = {
    "echo": echo,
    "pid": pid,
    "environment": environment,
    "look": look,
    "put": put_file,
    "put_later": put_later,
    "put_and_fail": put_and_fail,
    "die": die,
    "hang": hang,
    "huge": huge,
    "garbage": garbage,
    "flood": flood,
    "chatter": chatter,
    "steps": steps,
    "ask": ask,
    "answers_twice": answers_twice,
    "slow_exit": slow_exit,
}


def call_tool(number, params, now):
    tool = TOOLS.get(params["name"])
    if tool is None:
        fail(number, -32602, "no tool " + params["name"])
    else:
        tool(number, params.get("arguments") or {}, params.get("_meta") or {})


def initialize(number, params, now):
    capabilities = {
        "tools": {"listChanged": True},
        "resources": {"subscribe": True},
        "prompts": {},
        "completions": {},
        "logging": {},
    }
    server = {"name": "hostile", "version": "1"}
    answer(number, {"protocolVersion": "2025-11-25", "capabilities": capabilities, "serverInfo": server})


def list_tools(number, params, now):
    at = int(params.get("cursor", 0))
    page = {"tools": now["tools"][at : at + 10]}
    if at + 10 < len(now["tools"]):
        page["nextCursor"] = str(at + 10)
    answer(number, page)


def list_resources(number, params, now):
    answer(number, {"resources": now.get("resources", [])})


def list_templates(number, params, now):
    answer(number, {"resourceTemplates": now.get("templates", [])})


def list_prompts(number, params, now):
    answer(number, {"prompts": now.get("prompts", [])})


def read_resource(number, params, now):
    content = {"uri": params["uri"], "mimeType": "text/plain", "text": "read " + params["uri"]}
    answer(number, {"contents": [content]})


def get_prompt(number, params, now):
    fields = {"role": "user", "content": {"type": "text", "text": json.dumps(params)}}
    answer(number, {"messages": [fields]})


def complete(number, params, now):
    answer(number, {"completion": {"values": [params["argument"]["value"] + "!"], "hasMore": False}})


def subscribe(number, params, now):
    answer(number, {})
    notify("resources/updated", uri=params["uri"])


def unsubscribe(number, params, now):
    answer(number, {})


def set_level(number, params, now):
    answer(number, {})
    wanted["level"] = params["level"]


def cancel(number, params, now):
    if waiting.pop(params.get("requestId"), None):
        write_marker_file("cancelled", str(params.get("requestId")))


METHODS = {
    "initialize": initialize,
    "tools/list": list_tools,
    "resources/list": list_resources,
    "resources/templates/list": list_templates,
    "prompts/list": list_prompts,
    "resources/read": read_resource,
    "prompts/get": get_prompt,
    "completion/complete": complete,
    "resources/subscribe": subscribe,
    "resources/unsubscribe": unsubscribe,
    "logging/setLevel": set_level,
    "tools/call": call_tool,
    "notifications/cancelled": cancel,
}


def main():
    begins = plan()
    write_marker_file("started")
    if begins.get("mute"):
        time.sleep(3600)
    if begins.get("dies_at_start"):
        sys.stderr.write("I cannot find my configuration\n")
        sys.exit(3)
    for line in sys.stdin:
        message, now = json.loads(line), plan()
        method, number, params = message.get("method"), message.get("id"), message.get("params") or {}
        if method is None:
            asked = waiting.pop(number, None)
            if asked is not None:
                text(asked, json.dumps(message.get("result", message.get("error"))))
        elif method in METHODS:
            METHODS[method](number, params, now)
        elif number is not None:
            fail(number, -32601, "no method " + method)


main()
