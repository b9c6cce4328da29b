"""Tables: rows in, a DataFrame out, and `save`.

A table has keys as columns; `show` and `save` put headers in its language. Columns that end in _exact carry full
precision for the CSV and are left out of what is shown.
"""

from pdlib.tables.articles import figures, mistakes, table1, table2
from pdlib.tables.base import save, show
from pdlib.tables.latency import audit, errors
from pdlib.tables.transfer import kv_bytes, needed

__all__ = ["audit", "errors", "figures", "kv_bytes", "mistakes", "needed", "save", "show", "table1", "table2"]
