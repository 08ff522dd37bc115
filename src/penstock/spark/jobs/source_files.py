"""Files that are loaded: what they are, and their rows with everything that is wrong with them.

Owns: `SourceFiles` (which files there are, and the name by which the same ones are known again) and `read_rows`, which reads them. Nothing
is left out and nothing ends the reading: a row that the format does not allow comes with what is wrong with it in `FAULT`.
CSV is read as RFC 4180 has it: a quote is doubled, a quoted cell may hold line ends. JSON is read line by line, and the line itself is
kept: what was written is what becomes the payload.
"""

import os
from collections.abc import Mapping, Sequence

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.functions import arrow_udf

from penstock.rules.routing import digest
from penstock.spark.jobs.progress import translate_spark_errors
from penstock.words.errors import InvalidRequest

FORMATS = ("parquet", "csv", "json")
SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
PACKED = (".gz", ".bz2", ".zst", ".lz4", ".snappy", ".deflate")
FAULT, FILE, LINE = "__fault", "__file", "__line"
"""What is wrong with a row, the file it is from, and (JSON) the line that it is."""
ADDED_COLUMNS = (FAULT, FILE, LINE)
NOT_UTF8 = "not UTF-8: give the option encoding, such as encoding=ISO-8859-1"
_CORRUPT = "__corrupt"
_CSV = {"header": "true", "multiLine": "true", "quote": '"', "escape": '"'}
_MOST_COLUMNS = 5_000
_REPLACED = "\ufffd"
"""What Java reads where bytes are not of the encoding; a file may also say it in so many bytes."""


class SourceFiles(msgspec.Struct, frozen=True):
    """The files of a load."""

    paths: list[str]
    format: str
    count: int
    size_bytes: int
    id: str
    """Of their names, sizes and times: the same files, unchanged, have the same."""


def find_files(spark: SparkSession, source: str | Sequence[str], format: str | None) -> SourceFiles:
    """The files under a path, or several, wherever Spark can read; and what they are."""
    paths = check(source, format)
    with translate_spark_errors("looking for the source"):
        listed = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(paths)
        found = listed.select("path", "length", F.unix_micros("modificationTime")).collect()
    if not found:
        empty = all(os.path.isfile(path) for path in paths)  # Spark does not list what has no bytes
        what = f"{paths[0]!r:.200} is empty" if empty else f"there are no files in {paths[0]!r:.200}, or only empty ones"
        raise InvalidRequest(f"{what}, so there is nothing to load; mend the path, or the file")
    found = sorted(found)
    names = [row[0] for row in found]
    id = digest(b"load", *(str(part).encode() for row in found for part in row)).hex()
    return SourceFiles(paths, format or _format_of(names), len(found), sum(row[1] for row in found), id)


def check(source: str | Sequence[str], format: str | None) -> list[str]:
    """What can be found wrong without a Spark; else the paths as Spark takes them."""
    paths = [source] if isinstance(source, str) else list(source)
    if not paths or not all(isinstance(path, str) and path for path in paths):
        raise InvalidRequest("there is nothing to load; give the path of a file or a folder, or a list of them")
    if format is not None and format not in FORMATS:
        raise InvalidRequest(f"format is {format!r}; use {', '.join(FORMATS)}")
    return [absolute(path) for path in paths]


def absolute(path: str) -> str:
    """A path as Spark takes it, whose own current folder may be another."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _format_of(names: Sequence[str]) -> str:
    kinds = {_by_suffix(name) for name in names}
    known = sorted(kind for kind in kinds if kind is not None)
    if len(known) == 1 and None not in kinds:
        return known[0]
    if len(known) > 1:
        raise InvalidRequest(f"the files are of several formats ({', '.join(known)}); load each format by itself, such as *.{known[0]}")
    unknown = next(name for name in names if _by_suffix(name) is None).rpartition("/")[2]
    others = f", and others are {known[0]}; leave it out (*.{known[0]}), or" if known else ";"
    raise InvalidRequest(f"{unknown!r:.100} does not say what it is{others} give format: {', '.join(FORMATS)}")


def _by_suffix(name: str) -> str | None:
    low = name.lower()
    for packed in PACKED:
        low = low.removesuffix(packed)
    return next((format for suffix, format in SUFFIXES.items() if low.endswith(suffix)), None)


# -- reading -----------------------------------------------------------------------------------------


def read_rows(spark: SparkSession, files: SourceFiles, schema: str | None, options: Mapping[str, str]) -> DataFrame:
    """The rows of the files, with the columns of `OWN`.

    schema: the columns and their types, as SQL has them ("order long, amount double"); what is not of its type is a fault then.
    """
    typed = _schema(schema)
    with translate_spark_errors(f"reading {files.format} from {files.paths[0]!r:.200}"):
        if files.format == "parquet":
            return _parquet(spark, files, typed, options)
        return _csv(spark, files, typed, options) if files.format == "csv" else _json(spark, files, typed, options)


def _schema(given: str | None) -> T.StructType | None:
    if given is None:
        return None
    try:
        found = T.StructType.fromDDL(given)
    except Exception as error:  # py4j's own among them
        raise InvalidRequest(f"the schema {given!r:.200} is none; give columns and types, such as 'order long, amount double'") from error
    assert isinstance(found, T.StructType)
    return found


def _parquet(spark: SparkSession, files: SourceFiles, schema: T.StructType | None, options: Mapping[str, str]) -> DataFrame:
    reader = spark.read.options(**options)
    return _with_own((reader.schema(schema) if schema is not None else reader).parquet(*files.paths), F.lit(None), F.lit(None))


def _csv(spark: SparkSession, files: SourceFiles, schema: T.StructType | None, options: Mapping[str, str]) -> DataFrame:
    """Read once for the names of the columns, which takes the first line, and then with a column for what cannot be parsed."""
    tabs = {"sep": "\t"} if all(".tsv" in path.lower() for path in files.paths) else {}
    said = {**_CSV, **tabs, **options}
    found = schema if schema is not None else spark.read.options(**said).csv(files.paths).schema
    if not found.names:
        raise InvalidRequest(f"there is no row in {files.paths[0]!r:.200}, not even one of names; mend the file")
    wide = T.StructType([*found.fields, T.StructField(_CORRUPT, T.StringType())])
    permissive = {**said, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT, "columnPruning": "false"}
    rows = spark.read.options(**permissive).schema(wide).csv(files.paths)
    what = f"not a row of {len(found.names)} columns" + (" of these types" if schema is not None else "")
    fault = F.when(F.col(_CORRUPT).isNotNull(), F.lit(what))
    foreign = _not_utf8(spark, files, options)
    if foreign:
        if any(_REPLACED in name for name in found.names):
            raise InvalidRequest(f"the names of the columns are {NOT_UTF8}")
        texts = [field.name for field in wide if isinstance(field.dataType, T.StringType)]
        replaced = F.concat_ws("", *(F.col(quoted(name)) for name in texts)).contains(_REPLACED)
        fault = F.coalesce(F.when(replaced & F.col("_metadata.file_path").isin(foreign), F.lit(NOT_UTF8)), fault)
    return _with_own(rows, fault, F.col(_CORRUPT)).drop(_CORRUPT)


def _not_utf8(spark: SparkSession, files: SourceFiles, options: Mapping[str, str]) -> list[str]:
    """The files that are read as UTF-8 and are not. Spark's reader of CSV says nothing: it puts another character in their place."""
    said = {name.lower(): value.lower().replace("-", "") for name, value in options.items()}
    if said.get("encoding", said.get("charset", "utf8")) != "utf8":
        return []
    chosen = {name: value for name, value in options.items() if name.lower() in ("pathglobfilter", "recursivefilelookup", "compression")}
    lines = spark.read.options(**chosen).text(files.paths)  # their bytes as they are
    return [row[0] for row in lines.filter(~F.is_valid_utf8("value")).select("_metadata.file_path").distinct().collect()]


def _json(spark: SparkSession, files: SourceFiles, schema: T.StructType | None, options: Mapping[str, str]) -> DataFrame:
    if any(name.lower() == "multiline" for name in options):
        raise InvalidRequest("JSON is read line by line; leave multiLine out, and write each value on a line of its own")
    lines = spark.read.options(**options).text(files.paths)
    lines = lines.filter(F.trim("value") != "").select(F.col("value").alias(LINE), F.col("_metadata.file_path").alias(FILE))
    if schema is None:
        names = [row[0] for row in lines.select(F.explode(F.json_object_keys(LINE))).distinct().limit(_MOST_COLUMNS).collect()]
        schema = T.StructType([T.StructField(name, T.StringType()) for name in sorted(names)])
        fault = _json_fault(F.col(LINE).cast("binary"))
    else:
        fault = F.coalesce(
            _json_fault(F.col(LINE).cast("binary")), F.when(F.col(f"__parsed.{_CORRUPT}").isNotNull(), "not an object of these types")
        )
    wide = T.StructType([*schema.fields, T.StructField(_CORRUPT, T.StringType())])
    said = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    parsed = lines.withColumn("__parsed", F.from_json(LINE, wide, said))
    fields = [F.col(f"__parsed.{quoted(name)}").alias(name) for name in schema.names]
    return parsed.select(*fields, fault.alias(FAULT), FILE, LINE)


def _json_fault(line: Column) -> Column:
    """Why a line is not JSON. Spark's own parsers take `{"a": 1} x` for `{"a": 1}`; this one is that of whoever reads the payload."""
    told: Column = arrow_udf(_faults, T.StringType())(line)  # type: ignore[call-overload]  # its stubs want what has a default
    return told


def _faults(lines: pa.Array) -> pa.Array:
    return pa.array([_fault(line.as_py()) for line in lines], pa.string())


def _fault(line: bytes | None) -> str | None:
    try:
        msgspec.json.decode(line or b"")
    except (ValueError, RecursionError) as error:  # those of msgspec are ValueErrors
        return str(error)
    return None


def _with_own(rows: DataFrame, fault: Column, line: Column) -> DataFrame:
    own = {FAULT: fault.cast("string"), FILE: F.col("_metadata.file_path"), LINE: line.cast("string")}
    return rows.select("*", *(column.alias(name) for name, column in own.items()))


def quoted(name: str) -> str:
    """A column's name as SQL takes it."""
    return "`" + name.replace("`", "``") + "`"


def data_columns(rows: DataFrame) -> list[str]:
    """The columns that are the files' own."""
    return [name for name in rows.columns if name not in ADDED_COLUMNS]
