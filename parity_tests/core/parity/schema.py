"""Checks that a report, as JSON, fits the schema of reports."""

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from flax_attn.parity import Report, report_schema
from flax_attn.parity.report import plain


@cache
def _validator() -> Any:
    Draft202012Validator.check_schema(report_schema())
    return Draft202012Validator(report_schema())


def as_read(report: Report) -> dict[str, Any]:
    """What a reader of the JSON has, after it was validated."""
    document = json.loads(json.dumps(plain(report.to_dict()), allow_nan=False))
    _validator().validate(document)
    return document


def validated(report: Report) -> Report:
    """The same report, if its JSON fits."""
    as_read(report)
    return report
