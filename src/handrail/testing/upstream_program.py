"""An MCP server over stdin and stdout with scripted misbehaviour: ``python upstream_program.py PLAN.json``.

It is a separate program and needs only Python. The plan lists its tools and its misbehaviour; see
:class:`handrail.testing.upstreams.Program`. A plan that changes on disk applies from the next message on.
"""

# pyright: basic
# ruff: noqa: PTH103, PTH104, PTH110, PTH118, PTH120, PTH123, UP031

import json
import os
import sys
import threading
import time

plan_path = sys.argv[1]
lock = threading.Lock()
wanted = {"level": "info"}


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


def mark(name, content=""):
    """Leave a sign for the test, where its sandbox lets it: in its own home."""
    with open(os.path.join(os.environ["HOME"], name), "a") as file:
        file.write(content + "\n")


def later(sign, path):
    """Write a file once there is another one: at a time of the test's, which is no call's."""
    while not os.path.exists(sign):
        time.sleep(0.01)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".part", "w") as file:
        file.write("later")
    os.rename(path + ".part", path)


def called(number, params, waiting):
    tool, args = params["name"], params.get("arguments") or {}
    if tool == "echo":
        text(number, args.get("text", ""))
    elif tool == "pid":
        text(number, str(os.getpid()))
    elif tool == "environment":
        text(number, json.dumps(dict(os.environ)))
    elif tool == "look":
        try:
            with open(args["path"]) as file:
                text(number, file.read())
        except OSError as error:
            answer(number, {"isError": True, "content": [{"type": "text", "text": error.strerror}]})
    elif tool == "put":
        try:
            os.makedirs(os.path.dirname(args["path"]), exist_ok=True)
            with open(args["path"], "w") as file:
                file.write("put")
            text(number, "put")
        except OSError as error:
            answer(number, {"isError": True, "content": [{"type": "text", "text": error.strerror}]})
    elif tool == "put_later":
        threading.Thread(target=later, args=(args["sign"], args["path"]), daemon=True).start()
        text(number, "will")
    elif tool == "put_and_fail":
        os.makedirs(os.path.dirname(args["path"]), exist_ok=True)
        with open(args["path"], "w") as file:
            file.write("put")
        put({"jsonrpc": "2.0", "id": number, "error": {"code": -32000, "message": "no luck"}})
    elif tool == "die":
        os._exit(int(args.get("code", 7)))
    elif tool == "hang":
        mark("hanging")
        waiting[number] = True  # never answered, unless it is cancelled
    elif tool == "huge":
        size = int(args["bytes"])
        with lock:
            sys.stdout.write('{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"' % number)
            for _ in range(size // 65536):
                sys.stdout.write("x" * 65536)
            sys.stdout.write('"}]}}\n')
            sys.stdout.flush()
    elif tool == "garbage":
        with lock:
            sys.stdout.write('{"jsonrpc": "2.0", "id": %d, "result": {{{\n' % number)
            sys.stdout.flush()
    elif tool == "flood":
        line = "all of this goes to stderr\n" * 1000
        for _ in range(int(args.get("times", 100))):
            sys.stderr.write(line)
        sys.stderr.flush()
        text(number, "flooded")
    elif tool == "chatter":
        for _ in range(int(args.get("times", 1000))):
            put({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
            put({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}})
        text(number, "said")
    elif tool == "steps":
        token = (params.get("_meta") or {}).get("progressToken")
        for done in (1, 2):
            told = {"progressToken": token, "progress": done, "total": 2, "message": "step %d" % done}
            put({"jsonrpc": "2.0", "method": "notifications/progress", "params": told})
        put(
            {
                "jsonrpc": "2.0",
                "method": "notifications/message",
                "params": {"level": "warning", "data": {"n": 1}, "logger": "l"},
            }
        )
        if wanted["level"] == "debug":
            put({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "debug", "data": "fine"}})
        text(number, "stepped")
    elif tool == "ask":
        put({"jsonrpc": "2.0", "id": "ask-%d" % number, "method": args["method"], "params": args["params"]})
        waiting["ask-%d" % number] = number
    elif tool == "answers_twice":
        text(number, "once")
        text(number, "twice")
        text(number + 1000, "to nobody")
    elif tool == "slow_exit":
        text(number, "bye")
        sys.stdout.flush()
        os._exit(0)
    else:
        put({"jsonrpc": "2.0", "id": number, "error": {"code": -32602, "message": "no tool " + tool}})


def main():
    waiting = {}
    begins = plan()
    mark("started")
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
        elif method == "initialize":
            capabilities = {
                "tools": {"listChanged": True},
                "resources": {"subscribe": True},
                "prompts": {},
                "completions": {},
                "logging": {},
            }
            answer(
                number,
                {
                    "protocolVersion": "2025-11-25",
                    "capabilities": capabilities,
                    "serverInfo": {"name": "hostile", "version": "1"},
                },
            )
        elif method == "tools/list":
            at = int(params.get("cursor", 0))
            page = {"tools": now["tools"][at : at + 10]}
            if at + 10 < len(now["tools"]):
                page["nextCursor"] = str(at + 10)
            answer(number, page)
        elif method == "resources/list":
            answer(number, {"resources": now.get("resources", [])})
        elif method == "resources/templates/list":
            answer(number, {"resourceTemplates": now.get("templates", [])})
        elif method == "prompts/list":
            answer(number, {"prompts": now.get("prompts", [])})
        elif method == "resources/read":
            answer(
                number,
                {"contents": [{"uri": params["uri"], "mimeType": "text/plain", "text": "read " + params["uri"]}]},
            )
        elif method == "prompts/get":
            said = {"role": "user", "content": {"type": "text", "text": json.dumps(params)}}
            answer(number, {"messages": [said]})
        elif method == "completion/complete":
            answer(number, {"completion": {"values": [params["argument"]["value"] + "!"], "hasMore": False}})
        elif method in ("resources/subscribe", "resources/unsubscribe", "logging/setLevel"):
            answer(number, {})
            if method == "logging/setLevel":
                wanted["level"] = params["level"]
            if method == "resources/subscribe":
                put({"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": {"uri": params["uri"]}})
        elif method == "tools/call":
            called(number, params, waiting)
        elif method == "notifications/cancelled":
            if waiting.pop(params.get("requestId"), None):
                mark("cancelled", str(params.get("requestId")))
        elif number is not None:
            put({"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "no method " + method}})


main()
