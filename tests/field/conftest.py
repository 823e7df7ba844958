"""Program fixtures for the tests of reports."""

from tests.frontends.conftest import at_a_desk, handrail

__all__ = ["at_a_desk", "handrail"]
