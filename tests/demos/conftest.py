"""What the tests of the front ends have, the tests of the demonstrations have as well."""

from tests.frontends.conftest import at_a_desk, on_a_terminal

__all__ = ["at_a_desk", "on_a_terminal"]
