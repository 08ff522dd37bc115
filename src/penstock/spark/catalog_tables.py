"""Tables of Spark's catalog: CREATE TABLE … USING penstock OPTIONS (…).

Owns: `is_catalog_table`, `table_options`, `remember_options` and `remembered_options`. Spark gives a Python source the
options of such a table only when it is created; a query of the table has none. The catalog does keep the schema, with
the metadata of columns. So the source puts the options into the metadata of the first column, and finds them there.
"""

import json
from collections.abc import Mapping

from pyspark.sql.types import StructField, StructType

METADATA = "penstock.options"
PREFIX = "option."
"""Spark gives every option twice, once with this prefix."""
RESERVED = frozenset({"collation", "comment", "external", "is_managed_location", "location", "owner", "provider", "table_type"})
"""Properties of tables that are Spark's own."""


def is_catalog_table(given: Mapping[str, str]) -> bool:
    """Whether these are the options with which Spark creates a table."""
    return "provider" in given and "owner" in given


def table_options(given: Mapping[str, str]) -> dict[str, str]:
    """The user's options of a table that is created."""
    return {name: given[name] for name in given if name.lower() not in RESERVED and not name.lower().startswith(PREFIX)}


def remember_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """The schema, with the options in the metadata of its first column."""
    first, *others = schema.fields
    metadata = {**first.metadata, METADATA: json.dumps(dict(options))}
    return StructType([StructField(first.name, first.dataType, first.nullable, metadata), *others])


def remembered_options(schema: StructType) -> dict[str, str]:
    """The options in a schema; none if it is not of a table of the catalog."""
    found: dict[str, str] = json.loads(next((field.metadata[METADATA] for field in schema.fields if METADATA in field.metadata), "{}"))
    return found
