"""Parallel text in any supported format: find files and their languages, and read the pairs."""

from dap.text.archives import decode_line, disk_path, list_folder, read_sentences
from dap.text.corpus import count_pairs, load_bitext
from dap.text.find_files import HUB_ID, find_bitext
from dap.text.formats import (
    FORMATS,
    BitextFile,
    Format,
    LineAudit,
    read_numbered_lines,
    read_pairs,
    read_tables,
)
from dap.text.tmx_po import catalogue_pairs

__all__ = [
    "BitextFile",
    "FORMATS",
    "Format",
    "HUB_ID",
    "LineAudit",
    "catalogue_pairs",
    "count_pairs",
    "decode_line",
    "disk_path",
    "find_bitext",
    "list_folder",
    "load_bitext",
    "read_numbered_lines",
    "read_pairs",
    "read_sentences",
    "read_tables",
]
