"""Turn a checkpoint into a folder with a model card that other libraries load, and push it."""

from dap.publishing.folder import LAYOUTS, Options, build, build_with_card, publish, write_modules
from dap.publishing.hub import explained, fetch_checkpoint, upload
from dap.publishing.model_card import read_sources
from dap.publishing.space import write_space
