"""Parallel text from files of any supported format: which files hold which languages, and the pairs in them."""

from dap.text.archives import disk_path, read_sentences
from dap.text.blocks import Block, cut, is_cut
from dap.text.corpus import count_pairs, find_bitext, load_bitext
from dap.text.formats import BitextFile, LineAudit, finish_file, read_pairs
from dap.text.tables import audited_tables

__all__ = [
    "BitextFile",
    "Block",
    "LineAudit",
    "audited_tables",
    "count_pairs",
    "cut",
    "disk_path",
    "find_bitext",
    "finish_file",
    "is_cut",
    "load_bitext",
    "read_pairs",
    "read_sentences",
]
