"""Numbers as text: Markdown tables, means and errors."""


def markdown(header, rows):
    """Lines of a Markdown table, numbers to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def number(value, error=None, sign=""):
    return f"{value:{sign}.4f}" + (f" ± {error:.4f}" if error is not None else "")
