"""One kernel in this process or joined over the socket. Claims about sessions are tested with both."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from handrail import Kernel, Tool, open_kernel
from handrail.kernel.remote_kernel import RemoteKernel
from handrail.testing.scripted_kernel import KEYWORD_SEARCH, temporary_kernel

HELD, JOINED = "held", "joined"
Opens = Callable[..., AbstractAsyncContextManager[Kernel]]


@asynccontextmanager
async def opened(
    door: str,
    folder: Path,
    *,
    tools: Iterable[Tool] = (),
    rules: Iterable[str] = (),
    secrets: Mapping[str, str] | None = None,
    settings: str = "",
    **options: Any,
) -> AsyncGenerator[Kernel]:
    """See :func:`handrail.testing.scripted_kernel.temporary_kernel`; ``joined`` adds a separate lease holder."""
    if door == HELD:
        workspace, config = placed(folder, settings)
        state = folder / "state"
        async with open_kernel(
            workspace, tools=tools, rules=rules, secrets=secrets, state=state, config=config, **options
        ) as kernel:
            yield kernel
        return
    async with (
        temporary_kernel(folder, settings=settings) as holder,
        open_kernel(
            holder.workdir,
            tools=tools,
            rules=rules,
            secrets=secrets,
            state=folder / "state",
            config=folder / "config" / "handrail.toml",
            **options,
        ) as kernel,
    ):
        assert isinstance(kernel, RemoteKernel)
        yield kernel


def placed(folder: Path, settings: str) -> tuple[Path, Path]:
    """The workspace and the configuration file beneath ``folder``, made as :func:`temporary_kernel` makes them."""
    workspace, config = folder / "ws", folder / "config" / "handrail.toml"
    workspace.mkdir(exist_ok=True)
    config.parent.mkdir(exist_ok=True)
    config.write_text(settings if "[search]" in settings else f"{settings}\n{KEYWORD_SEARCH}")
    return workspace, config


def by_both_doors(**options: Any) -> Any:
    """A fixture that opens a kernel in a folder by either door.

    :param options: of :func:`opened`; a test may give others
    """

    @pytest.fixture(params=[HELD, JOINED])
    def kernel_in(request: pytest.FixtureRequest) -> Opens:
        return partial(opened, request.param, **options)

    return kernel_in
