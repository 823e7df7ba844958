"""The worker that runs one Python module's ``execute(topic, params, config, telemetry)`` in the tool's sandbox.

Started as ``python -I -c <this text> MODULE [serve]``. It imports nothing of Handrail, which the sandbox does not contain.
The protocol is that of executable tools: one JSON object in, one out, or one per line with ``serve``.
"""

import asyncio
import importlib.util
import inspect
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def main(path: str, serve: bool) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the module prints is for people, and no part of an answer
    sys.stdout = sys.stderr
    config = json.loads(os.environ.get("HANDRAIL_CONFIG", "{}"))
    if "HANDRAIL_SECRETS_FD" in os.environ:
        with os.fdopen(int(os.environ.pop("HANDRAIL_SECRETS_FD")), encoding="utf-8") as secrets:
            config |= json.load(secrets)
    os.environ.pop("HANDRAIL_CONFIG", None)
    sys.path.insert(0, str(Path(path).parent))
    source = importlib.util.spec_from_file_location("tool_module", path)
    if source is None or source.loader is None:
        raise SystemExit(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(source)
    sys.modules["tool_module"] = module
    try:
        source.loader.exec_module(module)
    except Exception as error:
        raise SystemExit(f"the module cannot be imported: {type(error).__name__}: {error}") from None
    loop = asyncio.new_event_loop()

    def called(given: dict[str, Any]) -> dict[str, Any]:
        wanted = inspect.signature(module.execute).parameters
        anything = any(one.kind is one.VAR_KEYWORD for one in wanted.values())
        more = {"config": config, "telemetry": given["telemetry"]}
        found = module.execute(
            given["topic"], given["params"], **{name: more[name] for name in more if anything or name in wanted}
        )
        if inspect.isawaitable(found):
            found = loop.run_until_complete(asyncio.wait_for(found, None))
        if not isinstance(found, dict):
            raise TypeError(
                f"execute returned a {type(found).__name__}; expected a dict with text, html or error in it"
            )
        return found  # pyright: ignore[reportUnknownVariableType]

    for line in sys.stdin:
        call = json.loads(line)
        try:
            found = called(call["arguments"] if serve else call)
            answer = json.dumps({"id": call["id"], "result": found} if serve else found)
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            answer = json.dumps({"id": call["id"], "error": message} if serve else {"error": message})
        answers.write(answer + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], "serve" in sys.argv[2:])
