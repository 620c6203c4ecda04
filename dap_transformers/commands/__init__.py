"""The commands: parse, call the library, print and write. No other code imports them.

The functions here are what an installed command runs. They answer `--version` and refuse text that
does not exist before the command is imported, because importing torch and Transformers takes
seconds.
"""

import sys
from functools import partial
from importlib import import_module
from pathlib import Path

from dap_transformers import __version__
from dap_transformers.text.archives import disk_path

#: Flags whose values are files and folders of text, or a Hub dataset, which has one slash.
TEXTS = ("text", "data", "data_dir", "gold", "train_data", "validation_data")


def run(module: str, first: str = "recipe") -> None:
    """Run the command of a module, or print the version. It takes a recipe or a "text" `first`."""
    argv = sys.argv[1:]
    if argv == ["--version"]:
        print(f"dap-transformers {__version__}")
        return

    flag = first
    for word in argv:
        if word.startswith("-"):
            flag = word.lstrip("-").replace("-", "_")
            continue
        is_recipe = flag == "recipe" and word.endswith(".yaml")
        is_text = flag in TEXTS and word.count("/") != 1
        if (is_recipe or is_text) and not disk_path(Path(word).expanduser()).exists():
            sys.exit(f"error: {word}: no such file or folder")
    import_module(module).main()


train_dap_main = partial(run, "train_dap")
eval_retrieval_main = partial(run, "eval_retrieval")
run_xnli_main = partial(run, "run_xnli")
mine_bitext_main = partial(run, "dap_transformers.commands.mine_bitext", first="text")
align_words_main = partial(run, "dap_transformers.commands.align_words", first="text")
prepare_data_main = partial(run, "dap_transformers.commands.prepare_data")
push_to_hub_main = partial(run, "dap_transformers.commands.push_to_hub")
