"""The API and its description say the same: the file in the repository is current, and a fuzzer that reads it, against
the server on a real socket, finds no 5xx and no answer that it does not document."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from litestar.datastructures import State
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.api.office import ALICE, bearer, token

from bursar.api.app import _litestar, _query_names, description
from bursar.api.problems import STATUSES

FILE = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"
SAID = json.loads(FILE.read_text())
SCHEMA = schemathesis.openapi.from_dict(SAID)
EXAMPLES = int(os.environ.get("BURSAR_FUZZ_EXAMPLES", "20"))  # per route; several hundred find no more so far
STAFF = [bearer(token(name, name)) for name in ("viewer", "operator", "approver", "admin")]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# What a fuzzer would hardly ever guess, and without which it gets no further than the first check.
LIKELY: dict[str, list[Any]] = {
    "from": ["FUNDING", "SPOT", "FUTURE", "funding", "trading"],
    "to": ["SPOT", "FUNDING", "trading", "funding"],
    "asset": ["USDT", "LIM", "OLD", "PIN"],
    "amount": ["1", "0.000001", "2.00", "1000", "1e3", "", "99999999999999999999"],
    "client_order_id": ["mine", "yours", None],
    "user_id": [ALICE],
    "reference": ["wire-1", "wire-2"],
    "account": [f"user:{ALICE}:funding"],
    "chain": ["sim", "nowhere"],
    "client_withdrawal_id": ["mine", "yours", None],
    "max_fee": ["", "1"],
    "address": ["0x" + "a5" * 20],
    "label": ["", "shop"],
    "memo": [""],
    "key": ["mine", "yours"],
    "base": [0, 1],
    "block": [0, 1, 2**53],
}
OPERATIONS = [
    (path, method, mode)
    for path, methods in SAID["paths"].items()
    for method in methods
    for mode in GenerationMode
    # Nothing can be wrong about a request that has no token, no parameters and no body.
    if method in ("get", "post", "put", "delete") and (path.startswith("/api/") or mode is GenerationMode.POSITIVE)
]


def test_the_description_in_the_repository_is_current() -> None:
    """If not: bursar openapi > docs/reference/openapi.json"""
    assert json.loads(json.dumps(description())) == SAID


def test_the_parameters_that_are_described_are_those_that_are_known() -> None:
    described = {
        (method.upper(), path): {one["name"] for one in said.get("parameters", ()) if one["in"] == "query"}
        for path, methods in SAID["paths"].items()
        for method, said in methods.items()
        if path.startswith("/api/")
    }
    assert _query_names(_litestar(State({}), 1)) == described
    assert any(described.values())


@pytest.mark.parametrize(
    ("path", "method", "mode"), OPERATIONS, ids=[f"{mode.value} {method} {path}" for path, method, mode in OPERATIONS]
)
def test_no_request_gets_an_answer_that_is_not_documented(
    served_by_sqlite: str, served_by_postgres: str, path: str, method: str, mode: GenerationMode
) -> None:
    """As the description allows, and as it does not; in every role, and as nobody. To invent a request takes longer
    than to answer it: each is sent to both."""
    operation = SCHEMA[path][method.upper()]
    callers: list[dict[str, str]] = [bearer(token(ALICE)), *STAFF, {}]
    strategy = operation.as_strategy(generation_mode=mode)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy, data=st.data())
    def ask(case: Any, data: st.DataObject) -> None:
        if isinstance(case.body, dict) and data.draw(st.booleans()):
            likely = {name: data.draw(st.sampled_from(LIKELY[name])) for name in case.body if name in LIKELY}
            case.body = {**case.body, **likely}
        caller = data.draw(st.sampled_from(callers))
        for served in (served_by_sqlite, served_by_postgres):
            case.validate_response(case.call(base_url=served, headers=caller), checks=CHECKS)

    ask()


def test_the_reference_names_every_code_with_its_status() -> None:
    rows = (FILE.parent / "api.md").read_text(encoding="utf-8").splitlines()
    for code, status in STATUSES.items():
        assert any(row.startswith(f"| `{code}` | {status} | ") for row in rows), code
