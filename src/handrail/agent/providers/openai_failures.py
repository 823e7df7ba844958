"""What the OpenAI SDK raises, in the words of :mod:`handrail.agent.providers.failures`; for both of its APIs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import openai

from handrail.agent.providers.failures import failure, late, unreachable, unreadable

KEY = "OPENAI_API_KEY"


@contextmanager
def explained(name: str, address: object) -> Generator[None]:
    """Around one request and the reading of its stream.

    :param name: the model, as the operator wrote it
    :param address: of the server
    :raises ProviderError: for what the SDK raises
    """
    try:
        yield
    except openai.APIStatusError as error:
        raise failure(name, KEY, error.status_code, error.code, error.message, error.response.headers) from error
    except openai.APITimeoutError as error:
        raise late(name, address) from error
    except openai.APIConnectionError as error:
        raise unreachable(name, address, error) from error
    except openai.APIError as error:
        raise failure(name, KEY, None, error.code or error.type, error.message, {}) from error
    except ValueError as error:
        raise unreadable(name, error) from error
