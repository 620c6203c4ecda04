"""The commands: parse, call the library, print and write. No other code imports them.

The functions here are what an installed command runs. They answer `--version` before the command is
imported, because importing torch and Transformers takes seconds.
"""

import sys
from functools import partial
from importlib import import_module

from dap_transformers import __version__


def run(module: str) -> None:
    """Run the command of a module, or print the version."""
    if sys.argv[1:] == ["--version"]:
        print(f"dap-transformers {__version__}")
    else:
        import_module(module).main()


train_dap_main = partial(run, "train_dap")
eval_retrieval_main = partial(run, "eval_retrieval")
run_xnli_main = partial(run, "run_xnli")
mine_bitext_main = partial(run, "dap_transformers.commands.mine_bitext")
align_words_main = partial(run, "dap_transformers.commands.align_words")
prepare_data_main = partial(run, "dap_transformers.commands.prepare_data")
push_to_hub_main = partial(run, "dap_transformers.commands.push_to_hub")
