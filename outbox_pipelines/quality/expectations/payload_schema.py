"""An expectation of payloads by a JSON Schema, which checks them as the writer does.

Great Expectations' own one checks the schema again for each value and ignores formats; a text that Python
cannot parse ends it.
"""

# No postponed annotations here: pydantic reads them.
import json
from typing import Any

from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.expectations import ExpectColumnValuesToMatchJsonSchema
from great_expectations.expectations.metrics import ColumnMapMetricProvider
from great_expectations.expectations.metrics.map_metric_provider import column_condition_partial

from outbox_pipelines.catalog.schemas import checker
from outbox_pipelines.writer.references import reference_of


class _PayloadMatchesSchema(ColumnMapMetricProvider):  # type: ignore[misc]
    condition_metric_name = "column_values.match_schema_of_event_type"
    condition_value_keys = ("json_schema",)

    @column_condition_partial(engine=PandasExecutionEngine)  # type: ignore[untyped-decorator]
    def _pandas(cls, column: Any, json_schema: dict[str, Any], **_: Any) -> Any:  # noqa: N805
        is_valid = checker(json_schema).is_valid

        def matches(text: str) -> bool:
            try:
                payload = json.loads(text)
                # The schema is that of the body.
                return reference_of(payload) is not None or bool(is_valid(payload))
            # A number of thousands of digits, or JSON that is nested too deeply.
            except (ValueError, RecursionError):
                return False

        return column.map(matches).astype(bool)


class ExpectPayloadToMatchSchema(ExpectColumnValuesToMatchJsonSchema):  # type: ignore[misc]
    """Expect the JSON texts of a column to match a JSON Schema, formats included."""

    map_metric = "column_values.match_schema_of_event_type"
