"""The fixtures of the front end tests, for the tests of the demos."""

from tests.frontends.conftest import at_a_desk, on_a_terminal

__all__ = ["at_a_desk", "on_a_terminal"]
