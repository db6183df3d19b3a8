"""What schemathesis makes of the OpenAPI document: nothing is answered by a fault, or otherwise than it says."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.python import asgi
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from toys import EchoReader, memory_of, talk

from zeromem_torch.serving.keys import KEYS, Keys
from zeromem_torch.serving.server import create_app
from zeromem_torch.serving.service import Limits, MemoryService

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
REFUSED = [400, 401, 403, 404, 405, 408, 409, 413, 415, 422]
LEAST = 5_000
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
LARGE = {"POST /v1/search", "POST /v1/memories", "POST /v1/answer"}
"""Whose requests take longest to draw."""
LIMITS = Limits(text_chars=500, query_chars=200, queries=8, messages=8, body_bytes=1 << 18)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """The operations of a server, and a client of it that has a key for everything."""
    memory = memory_of(*talk("lake", ["We went to the lake.", "Was it cold?"], ["The red boat sank."]))
    keys = Keys(tmp_path / KEYS)
    secret = keys.make("ops", scopes=["admin"], boundaries=None)
    service = MemoryService(memory, limits=LIMITS, keys=keys, reader=EchoReader(), warm_up=False)
    app: Any = create_app(service, mcp=False)
    checks = {"negative_data_rejection": {"expected-statuses": REFUSED}}
    given_headers = {"Authorization": f"Bearer {secret}"}
    config = schemathesis.Config.from_dict({"headers": given_headers, "checks": checks})
    try:
        with asgi.get_client(app) as client:
            schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=config)
            operations: list[Any] = [*schema.get_all_operations()]
            yield [found.ok() for found in operations], client
    finally:
        asgi.shutdown_lifespans()


def cases(operation: Any, client: Any, mode: GenerationMode, number: int) -> Counter[int]:
    """Send so many cases, check what comes back, and count it by status."""
    seen: Counter[int] = Counter()

    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def each(case: Any) -> None:
        if mode is POSITIVE and isinstance(case.body, dict) and case.body.get("timeout") is not None:
            case.body["timeout"] = LIMITS.longest_timeout  # a deadline that cannot be met is 503, and rightly so
        reply = case.call(session=client)
        seen[reply.status_code] += 1
        case.validate_response(reply, checks=CHECKS)

    each()
    return seen


@pytest.mark.slow
def test_thousands_of_cases_find_no_fault_and_nothing_that_the_schema_does_not_say(served: Any) -> None:
    operations, client = served
    seen: dict[str, Counter[int]] = {}
    for operation in operations:
        fixed = not (len(operation.body) or len(operation.query) or len(operation.path_parameters))
        for mode, number in ((POSITIVE, 250), (NEGATIVE, 75 if operation.label in LARGE else 130)):
            if not (fixed and mode is NEGATIVE):
                seen[f"{operation.label}, {mode.value}"] = cases(operation, client, mode, 1 if fixed else number)
    total = sum(sum(own.values()) for own in seen.values())
    assert total >= LEAST, seen
    for name, own in seen.items():
        assert not any(status >= 500 for status in own), (name, own)
        if name.endswith("positive"):  # a document that only describes refusals would be kept easily
            assert any(status < 400 or status == 404 for status in own), (name, own)
