"""From a checkpoint to a folder that others load, with its model card, and on to the Hub."""

from dap.publishing.folder import LAYOUTS, Options, build, publish, write, write_modules
from dap.publishing.hub import explained, fetch, upload
from dap.publishing.model_card import read_sources
from dap.publishing.space import write_space
