"""From a checkpoint to a folder that others load, with its model card, and on to the Hub."""

from dap.publishing.folder import LAYOUTS, Options, publish, write
from dap.publishing.hub import explained, fetch, upload
from dap.publishing.model_card import read_sources

__all__ = ["LAYOUTS", "Options", "explained", "fetch", "publish", "read_sources", "upload", "write"]
