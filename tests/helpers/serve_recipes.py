"""The recipes of examples/serve.md, which two test files run."""

import re

from conftest import REPOSITORY


def _recipes() -> dict[str, str]:
    """Return the first code block below each heading of the page, by heading."""
    page = (REPOSITORY / "examples/serve.md").read_text()
    found = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        code = re.search(r"^```(?:py|js)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        if code:
            found[heading] = code[1]
    return found


#: Client -> its code, which makes `vectors` of `sentences`, or of `texts` with the prefix in front.
RECIPES = _recipes()
