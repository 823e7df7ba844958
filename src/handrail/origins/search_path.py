"""Takes the current folder off the search path for modules, before a program of Handrail's imports anything further.

It imports only what the interpreter has loaded already: each further import would be looked for in that folder first.
"""

from __future__ import annotations

import os
import sys


def leave_out_current_folder() -> None:
    """Take the current folder, and what a variable names in it, off ``sys.path``: for a program that is Handrail's alone.

    ``python -m`` puts the folder there, and PYTHONPATH may name a folder of the project. What Handrail and Python are installed in
    stays, wherever it lies.
    """
    try:
        here = os.path.realpath(os.getcwd())  # noqa: PTH109
    except OSError:
        here = "/"
    beside = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    own = (beside, os.path.dirname(os.__file__), f"{sys.prefix}/lib")  # noqa: PTH120
    broad = here in ("/", os.path.realpath(os.path.expanduser("~")))  # noqa: PTH111
    named = {os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep)}  # noqa: PTH100

    def is_kept(entry: str) -> bool:
        if not entry.startswith("/"):
            return False
        if any(entry == folder or entry.startswith(f"{folder}/") for folder in own):
            return True
        real = os.path.realpath(entry)
        by_variable = os.path.abspath(entry) in named and real.startswith(f"{here}/")  # noqa: PTH100
        return real != here and (broad or not by_variable)

    sys.path[:] = [entry for entry in sys.path if is_kept(entry)]
