"""Tables of n-gram memories wherever they live: on a GPU, in memory or on disk, always with the same bytes.

`export_table` writes one, `open_table` opens it or a checkpoint's in place, `Table.gather` reads rows. `MappedMultiHeadEmbedding`
and `MappedEmbedding` put a table into a model, `offload_tables` and `load_with_tables` do so for models of transformers.
"""

from .export import export_table
from .format import RowLayout, TableChangedError, TableDigestError, TableError, TableFormatError, TableSizeError
from .modules import MappedEmbedding, MappedMultiHeadEmbedding
from .offload import load_with_tables, offload_tables
from .stats import TableStats
from .table import ScaledRows, Table, open_table


__all__ = [
    "MappedEmbedding",
    "MappedMultiHeadEmbedding",
    "RowLayout",
    "ScaledRows",
    "Table",
    "TableChangedError",
    "TableDigestError",
    "TableError",
    "TableFormatError",
    "TableSizeError",
    "TableStats",
    "export_table",
    "load_with_tables",
    "offload_tables",
    "open_table",
]
