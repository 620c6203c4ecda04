"""Turn a checkpoint into a folder with a model card that other libraries load, and push it."""

from dap.publishing.folder import LAYOUTS, Options, build, build_with_card, publish, write_modules
from dap.publishing.hub import explained, fetch_checkpoint, upload
from dap.publishing.model_card import read_sources
from dap.publishing.mteb_results import read_result
from dap.publishing.space import write_space

__all__ = [
    "LAYOUTS",
    "Options",
    "build",
    "build_with_card",
    "explained",
    "fetch_checkpoint",
    "publish",
    "read_result",
    "read_sources",
    "upload",
    "write_modules",
    "write_space",
]
