"""An output shaper with real folders, and the expected outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from handrail.arbiter.output.output_files import OutputFileQuota
from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.arbiter.output.shaper import AudienceOutputs, OutputShaper
from handrail.contract.tool.spec import ToolSpec
from handrail.record.artifacts import ArtifactStore

SECRET = 'hunter2-"quoted"\\é'
METADATA = {"duration_ms": 1.5, "sandbox": "operator"}


def bounded(folder: Path, most: int = 1 << 30) -> OutputFileQuota:
    """Room for the sidecars of all sessions whose folders are in ``folder``."""
    return OutputFileQuota(folder, most)


class ShaperFixture:
    """One kernel's shaper with real folders."""

    def __init__(self, folder: Path, **secrets: str) -> None:
        self.output = folder / "output"
        self.output.mkdir()
        (folder / "artifacts").mkdir()
        self.artifacts = ArtifactStore(folder / "artifacts")
        self.shaper = OutputShaper(
            SecretRedactor(secrets), self.artifacts, lambda session: self.output, bounded(folder)
        )

    async def shape(self, value: object, call_id: str = "call-1", **spec: Any) -> AudienceOutputs:
        """As the arbiter does it: the quick way first."""
        tool = ToolSpec("tool", "…", **spec)
        small = self.shaper.try_shape_small_output(tool, value, dict(METADATA))
        return small or await self.shaper.shape_output(tool, value, METADATA, call_id=call_id, session_id="s")

    def sidecar(self, shaped: AudienceOutputs) -> str:
        path = Path(shaped.result.metadata["output_path"])
        assert path.parent == self.output
        return path.read_bytes().decode()

    def everything_written(self, shaped: AudienceOutputs) -> bytes:
        files = [path.read_bytes() for path in (self.output.parent).rglob("*") if path.is_file()]
        names = [str(path).encode() for path in self.output.parent.rglob("*")]
        texts = [orjson.dumps(part) for part in (shaped.result.to_dict(), shaped.model.to_dict(), shaped.logged)]
        return b"\0".join([*files, *names, *texts])


def logged(shaped: AudienceOutputs) -> dict[str, Any]:
    return orjson.loads(orjson.dumps(shaped.logged))["result"]
