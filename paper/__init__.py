"""The paper's figures and tables: the runs that each needs, what the paper claims, and our numbers beside it.

    python -m paper.reproduce fig7 --dry_run

Read in this order: scales.py (runs in the paper's units, and what a scale makes of them), found.py (what finished runs
have left), claims.py (what we compute from it), tables.py, panels.py (how we draw it),
figures.py (the runs, panels and claims of each figure), reproduce.py (plan, train, analyse, numbers and the report).
"""
