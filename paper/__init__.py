"""The paper's figures and tables: the runs that each needs, what the paper claims, and our numbers beside it.

    python -m paper.reproduce fig7 --dry_run

Read in this order: runs.py (runs in the paper's units, and what a scale makes of them), found.py (what finished runs
have left), claims.py (what is computed from it), figures.py (which runs, panels and claims make each figure),
tables.py, panels.py (how panels are drawn), results.py (figures, numbers and the report), reproduce.py (plan, train,
analyse). Only docs/tables.py imports it from outside.
"""
