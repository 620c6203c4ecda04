"""Parallel text from files of any supported format: which files hold which languages, and the pairs in them."""

from dap.text.archives import disk_path, list_folder, read_sentences
from dap.text.corpus import count_pairs, load_bitext
from dap.text.find_files import HUB_ID, BitextFile, find_bitext
from dap.text.formats import LineAudit, read_pairs, read_tables
from dap.text.tmx_po import catalogue_pairs
