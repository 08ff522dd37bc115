"""The files of a load: which there are, and their rows.

Owns: `SourceFiles` (the files, and an id that is the same for the same files) and `read_rows`. A malformed row does not
fail the reading and is not left out: it has its fault in the column `FAULT`.
CSV is read as in RFC 4180: quotes are doubled, and a quoted cell may contain line ends. JSON is read line by line; the
line itself is kept, so that it becomes the payload unchanged.
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
TSV = "tsv"
"""CSV with tabs, known by the files' names; its format is csv."""
SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": TSV,
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
SUBFOLDERS = ("recursiveFileLookup", "true")
PACKED = (".gz", ".bz2", ".zst", ".lz4", ".snappy", ".deflate")
FAULT, FILE, LINE = "__fault", "__file", "__line"
"""The columns with the fault of a row, its file, and (JSON) its line."""
ADDED_COLUMNS = (FAULT, FILE, LINE)
NOT_UTF8 = "not UTF-8: give the option encoding, such as encoding=ISO-8859-1"
MIXED_LINE_ENDS = "line ends are mixed, or a quote is not closed; if no cell has line ends, give the option multiLine=false"
_CORRUPT = "__corrupt"
_CSV = {"header": "true", "multiLine": "true", "quote": '"', "escape": '"'}
_MOST_COLUMNS = 5_000
_REPLACED = "\ufffd"
"""What Java reads for bytes that are not UTF-8; a valid file may contain this character too."""


class SourceFiles(msgspec.Struct, frozen=True):
    """The files of a load."""

    paths: list[str]
    format: str
    count: int
    size_bytes: int
    id: str
    """Digest of their names, sizes and times: the same for the same, unchanged files."""
    reader_options: dict[str, str] = {}
    """Options that Spark's reader needs for these files; the user's options win."""


def find_files(spark: SparkSession, source: str | Sequence[str], format: str | None) -> SourceFiles:
    """List the files under the paths and subfolders, with their format. InvalidRequest if there are none."""
    paths = check_source(source, format)
    with translate_spark_errors("listing the source"):
        listed = spark.read.format("binaryFile").option(*SUBFOLDERS).load(paths)
        found = listed.select("path", "length", F.unix_micros("modificationTime")).collect()
        # By default Spark reads subfolders only if they are partition folders (name=value), whose values become
        # columns.
        default = spark.read.format("binaryFile").load(paths).inputFiles()
        subfolders = len(default) < len(listed.inputFiles())
    if not found:
        empty = all(os.path.isfile(path) for path in paths)  # Spark does not list what has no bytes
        what = f"{paths[0]!r:.200} is empty" if empty else f"there are no files in {paths[0]!r:.200}, or only empty ones"
        raise InvalidRequest(f"{what}, so there is nothing to load; fix the path, or the file")
    found = sorted(found)
    names = [row[0] for row in found]
    id = digest(b"load", *(str(part).encode() for row in found for part in row)).hex()
    options = dict([SUBFOLDERS]) if subfolders else {}
    if all(_by_suffix(name) == TSV for name in names):
        options["sep"] = "\t"
    return SourceFiles(paths, format or _format_of(names), len(found), sum(row[1] for row in found), id, options)


def check_source(source: str | Sequence[str], format: str | None) -> list[str]:
    """Check source and format without Spark; gives the paths for Spark."""
    paths = [source] if isinstance(source, str) else list(source)
    if not paths or not all(isinstance(path, str) and path for path in paths):
        raise InvalidRequest("there is nothing to load; give the path of a file or a folder, or a list of them")
    if format is not None and format not in FORMATS:
        raise InvalidRequest(f"format is {format!r}; use {', '.join(FORMATS)}")
    return [absolute(path) for path in paths]


def absolute(path: str) -> str:
    """An absolute path for Spark, which may have another current folder."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _format_of(names: Sequence[str]) -> str:
    kinds = {_by_suffix(name) for name in names}
    known = sorted(kind for kind in kinds if kind is not None)
    if len(known) == 1 and None not in kinds:
        return "csv" if known[0] == TSV else known[0]
    if len(known) > 1:
        raise InvalidRequest(f"the files are of several formats ({', '.join(known)}); load each format separately, such as *.{known[0]}")
    unknown = next(name for name in names if _by_suffix(name) is None).rpartition("/")[2]
    others = f", and others are {known[0]}; leave it out (*.{known[0]}), or" if known else ";"
    raise InvalidRequest(f"{unknown!r:.100} has no known suffix{others} give format: {', '.join(FORMATS)}")


def _by_suffix(name: str) -> str | None:
    low = name.lower()
    for packed in PACKED:
        low = low.removesuffix(packed)
    return next((format for suffix, format in SUFFIXES.items() if low.endswith(suffix)), None)


# -- reading -----------------------------------------------------------------------------------------


def read_rows(spark: SparkSession, files: SourceFiles, schema: str | None, options: Mapping[str, str]) -> DataFrame:
    """The rows of the files, with the columns ADDED_COLUMNS.

    schema: columns and types, as in SQL ("order long, amount double"); a value of another type is then a fault.
    """
    typed = _schema(schema)
    options = {**files.reader_options, **options}
    with translate_spark_errors(f"reading {files.format} from {files.paths[0]!r:.200}"):
        if files.format == "parquet":
            return _parquet(spark, files, typed, options)
        return _csv(spark, files, typed, options) if files.format == "csv" else _json(spark, files, typed, options)


def _schema(given: str | None) -> T.StructType | None:
    if given is None:
        return None
    try:
        found = T.StructType.fromDDL(given)
    except Exception as error:  # also Py4J's errors
        raise InvalidRequest(
            f"the schema {given!r:.200} cannot be parsed; give columns and types, such as 'order long, amount double'"
        ) from error
    assert isinstance(found, T.StructType)
    return found


def _parquet(spark: SparkSession, files: SourceFiles, schema: T.StructType | None, options: Mapping[str, str]) -> DataFrame:
    reader = spark.read.options(**options)
    return _with_added_columns((reader.schema(schema) if schema is not None else reader).parquet(*files.paths), F.lit(None), F.lit(None))


def _csv(spark: SparkSession, files: SourceFiles, schema: T.StructType | None, options: Mapping[str, str]) -> DataFrame:
    """Read the column names, from the first line; then read with a column for rows that cannot be parsed."""
    given = {**_CSV, **options}
    found = schema if schema is not None else spark.read.options(**given).csv(files.paths).schema
    if not found.names:
        raise InvalidRequest(f"there is no row in {files.paths[0]!r:.200}, not even the column names; fix the file")
    wide = T.StructType([*found.fields, T.StructField(_CORRUPT, T.StringType())])
    permissive = {**given, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT, "columnPruning": "false"}
    rows = spark.read.options(**permissive).schema(wide).csv(files.paths)
    malformed = f"not a row of {len(found.names)} columns" + (" of these types" if schema is not None else "")
    several = F.col(_CORRUPT).rlike("[\\r\\n].")
    fault = F.when(several, F.lit(f"{malformed}, but several lines: {MIXED_LINE_ENDS}")).when(F.col(_CORRUPT).isNotNull(), F.lit(malformed))
    last = found.fields[-1]
    if isinstance(last.dataType, T.StringType):
        # Spark takes the first line's end for that of all lines, and leaves the rest of another one in the last cell.
        mixed = F.col(quoted(last.name)).endswith("\r")
        fault = F.coalesce(fault, F.when(mixed, F.lit(f"ends with a carriage return: {MIXED_LINE_ENDS}")))
    foreign = _not_utf8(spark, files, options)
    if foreign:
        if any(_REPLACED in name for name in found.names):
            raise InvalidRequest(f"the names of the columns are {NOT_UTF8}")
        texts = [field.name for field in wide if isinstance(field.dataType, T.StringType)]
        replaced = F.concat_ws("", *(F.col(quoted(name)) for name in texts)).contains(_REPLACED)
        fault = F.coalesce(F.when(replaced & F.col("_metadata.file_path").isin(foreign), F.lit(NOT_UTF8)), fault)
    return _with_added_columns(rows, fault, F.col(_CORRUPT)).drop(_CORRUPT)


def _not_utf8(spark: SparkSession, files: SourceFiles, options: Mapping[str, str]) -> list[str]:
    """The files that are read as UTF-8 but are not UTF-8. Spark's CSV reader raises no error; it replaces the bytes."""
    given = {name.lower(): value.lower().replace("-", "") for name, value in options.items()}
    if given.get("encoding", given.get("charset", "utf8")) != "utf8":
        return []
    chosen = {name: value for name, value in options.items() if name.lower() in ("pathglobfilter", "recursivefilelookup", "compression")}
    lines = spark.read.options(**chosen).text(files.paths)  # does not replace bytes
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
    permissive = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    parsed = lines.withColumn("__parsed", F.from_json(LINE, wide, permissive))
    fields = [F.col(f"__parsed.{quoted(name)}").alias(name) for name in schema.names]
    return parsed.select(*fields, fault.alias(FAULT), FILE, LINE)


def _json_fault(line: Column) -> Column:
    """Why a line is not JSON, else NULL. Uses Penstock's JSON parser: Spark's accepts `{"a": 1} x` as `{"a": 1}`."""
    fault: Column = arrow_udf(_faults, T.StringType())(line)  # type: ignore[call-overload]  # the stubs require an optional argument
    return fault


def _faults(lines: pa.Array) -> pa.Array:
    return pa.array([_fault(line.as_py()) for line in lines], pa.string())


def _fault(line: bytes | None) -> str | None:
    try:
        msgspec.json.decode(line or b"")
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        return str(error)
    return None


def _with_added_columns(rows: DataFrame, fault: Column, line: Column) -> DataFrame:
    added = {FAULT: fault.cast("string"), FILE: F.col("_metadata.file_path"), LINE: line.cast("string")}
    return rows.select("*", *(column.alias(name) for name, column in added.items()))


def quoted(name: str) -> str:
    """A column's name, quoted for SQL."""
    return "`" + name.replace("`", "``") + "`"


def data_columns(rows: DataFrame) -> list[str]:
    """The columns that come from the files."""
    return [name for name in rows.columns if name not in ADDED_COLUMNS]
