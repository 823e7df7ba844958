"""What the OpenAI SDK raises, in the words of :mod:`handrail.agent.providers.failures`; for both of its APIs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import openai

from handrail.agent.model import ProviderBusy, StreamCut
from handrail.agent.providers.failures import failure

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
        raise ProviderBusy(f"{name}: the provider did not answer in time ({address})") from error
    except openai.APIConnectionError as error:
        said = error.__cause__ or error
        raise ProviderBusy(f"{name}: no connection to {address}, or it broke off ({said})") from error
    except openai.APIError as error:
        raise failure(name, KEY, None, error.code or error.type, error.message, {}) from error
    except ValueError as error:
        raise StreamCut(f"{name}: the provider sent an event that is not JSON ({error})") from error
