"""Errors of the OpenAI SDK as errors of a provider, for both of its APIs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress

import openai

from handrail.agent.model_protocol import ProviderError
from handrail.agent.providers.provider_errors import (
    make_connection_error,
    make_reported_error,
    make_stream_format_error,
    make_timeout_error,
)

KEY_VARIABLE = "OPENAI_API_KEY"


@contextmanager
def map_sdk_errors(name: str, address: object) -> Generator[None]:
    """Map the SDK's errors during one request and its stream to :class:`ProviderError`.

    :param name: the model, as the operator wrote it
    :param address: the address of the server
    :raises ProviderError: for an error of the SDK
    """
    try:
        yield
    except openai.APIStatusError as error:
        body: object = error.body or error.message
        with suppress(ValueError, RecursionError):  # the SDK leaves out what is next to the member "error"
            body = error.response.json() or body
        raise make_reported_error(name, KEY_VARIABLE, body, error.status_code, error.response.headers) from error
    except openai.APITimeoutError as error:
        raise make_timeout_error(name, address) from error
    except openai.APIConnectionError as error:
        if isinstance(cause := error.__cause__, ProviderError):
            raise cause from None
        raise make_connection_error(name, address, error) from error
    except openai.APIError as error:
        raise make_reported_error(name, KEY_VARIABLE, error.body or error.message) from error
    except ValueError as error:
        raise make_stream_format_error(name, error) from error
