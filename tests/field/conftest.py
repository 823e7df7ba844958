"""The fixtures of programs, for reports about programs."""

from tests.frontends.conftest import at_a_desk, handrail

__all__ = ["at_a_desk", "handrail"]
