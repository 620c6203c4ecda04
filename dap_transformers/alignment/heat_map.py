"""Draw a word alignment as an HTML table. The browser has fonts for every script."""

from html import escape

from dap_transformers.alignment.word_alignment import WordAlignment

#: Most rules are `!important`, because pages such as Gradio's have rules of their own for tables.
_STYLE = """<style>
.word-map {overflow-x: auto; max-width: 100%}
.word-map table {border-collapse: separate !important; border-spacing: 2px; width: auto !important;
  margin: 0 !important; border: 0 !important}
.word-map th, .word-map td {border: 0 !important; padding: 4px 6px !important; font-size: 15px}
.word-map th {font-weight: 500; white-space: nowrap}
.word-map thead th {vertical-align: bottom; text-align: center !important}
.word-map tbody th {text-align: end !important; position: sticky; left: 0; z-index: 1;
  background: var(--block-background-fill, canvas)}
.word-map td {min-width: 44px; height: 36px; text-align: center !important; border-radius: 6px;
  font-variant-numeric: tabular-nums}
.word-map td.linked {outline: 3px solid #d1495b; outline-offset: -3px; font-weight: 700}
</style>"""


def heat_map(alignment: WordAlignment) -> str:
    """Return an HTML table with the cosines of a sentence pair's words.

    The source words stand at the rows, the target words at the columns. A cell has the cosine, on a
    blue that is darker the higher the cosine is among those of the pair. A red frame marks a link.

    Returns:
        HTML that needs no other file.
    """
    similarity = alignment.similarity
    linked = {(int(row), int(column)) for row, column in alignment.links}
    lowest = float(similarity.min()) if similarity.size else 0.0
    width = (float(similarity.max()) - lowest if similarity.size else 0.0) or 1.0

    head = "".join(f'<th scope="col" dir="auto">{escape(word)}</th>' for word in alignment.target)
    rows = []
    for i, word in enumerate(alignment.source):
        cells = []
        for j, cosine in enumerate(similarity[i].tolist()):
            share = (cosine - lowest) / width
            cells.append(_cell(cosine, share, (i, j) in linked))
        row = f'<tr><th scope="row" dir="auto">{escape(word)}</th>{"".join(cells)}</tr>'
        rows.append(row)
    table = f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'{_STYLE}<div class="word-map">{table}</div>'


def _cell(cosine: float, share: float, is_linked: bool) -> str:
    """Return a cell of the table as HTML."""
    ink = "#fff" if share > 0.75 else "#0b1f33"
    # mixed with white, so that the ink can be read on a dark page as well
    red, green, blue = (round(255 - share * (255 - part)) for part in (0x1F, 0x5F, 0x99))
    style = f"background: rgb({red}, {green}, {blue}); color: {ink}"
    kind = ' class="linked"' if is_linked else ""
    return f'<td{kind} style="{style}">{cosine:.2f}</td>'
